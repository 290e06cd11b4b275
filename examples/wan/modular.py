"""The same pipeline, handed over whole: `stagewire.modular.stages` makes a stage of each block of `WanBlocks`.

    stagewire up examples/wan/modular.toml

No stage functions to write. Parameters go to the blocks' inputs by name, tensors go from block to block by name, and
the denoising loop's progress bar becomes the job's. The decoder gets its latents whole, as diffusers' block wants them;
see `pipeline.py` for one that decodes chunk by chunk.
"""

import numpy as np
import stagewire
import stagewire.modular
from diffusers.modular_pipelines import ModularPipelineBlocks
from diffusers.modular_pipelines.modular_pipeline_utils import InputParam, OutputParam
from diffusers.modular_pipelines.wan import WanBlocks

import files
import model


class StartStep(ModularPipelineBlocks):
    """Makes the latents to start from, in place of diffusers' white noise: any block can be added to a pipeline."""

    model_name = "wan"

    @property
    def description(self) -> str:
        return "Draws coarse noise from a seed"

    @property
    def inputs(self) -> list[InputParam]:
        return [InputParam(name, required=True) for name in ("seed", "width", "height", "num_frames")]

    @property
    def intermediate_outputs(self) -> list[OutputParam]:
        return [OutputParam("latents")]

    def __call__(self, components, state):
        block_state = self.get_block_state(state)
        block_state.latents = model.start_latents(
            block_state.seed, block_state.width, block_state.height, block_state.num_frames
        )
        self.set_block_state(state, block_state)
        return components, state


def finish(ctx, outputs) -> stagewire.Result:
    """The files to keep of what the last block made."""
    video = np.asarray(outputs["videos"])[0]
    return stagewire.Result(
        {name: stagewire.Artefact(data) for name, data in files.all_of(video, model.FPS).items()},
        info={"frames": len(video), "fps": model.FPS, "height": video.shape[1], "width": video.shape[2]},
    )


def blocks() -> WanBlocks:
    wan = WanBlocks()
    wan.sub_blocks["denoise"].sub_blocks.insert("start", StartStep(), 0)
    return wan


stages = stagewire.modular.stages(
    blocks(),
    components=model.makers(model.dtype_from_env()),
    names={"text_encoder": "encode"},
    params={"steps": "num_inference_steps", "frames": "num_frames"},
    finish=finish,
)
