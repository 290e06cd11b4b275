"""Decodes a Wan video slice by slice, as the latents arrive, with the bits of decoding it whole.

`AutoencoderKLWan.decode` walks over the latent frames one by one anyway and carries the past in a cache of features:
its convolutions look back in time, never ahead. `CausalDecoder` is that walk with a door: it takes the latent frames in
as many slices as you like. One slice is the stock call; many slices give the same bits, only earlier.
"""

from collections.abc import Iterator

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify


class CausalDecoder:
    """One video's walk through a VAE. The cache lives in the VAE object: one video at a time for each.

    Args:
        vae: An `AutoencoderKLWan`.
        video_processor: Turns `[-1, 1]` tensors into `[0, 1]` arrays, as the pipeline's own.
    """

    def __init__(self, vae, video_processor) -> None:
        self.vae = vae
        self.video_processor = video_processor
        self.first = True
        vae.clear_cache()

    @torch.no_grad()
    def frames(self, latents: torch.Tensor) -> Iterator[np.ndarray]:
        """Decodes the next latent frames `[1, C, t, H/8, W/8]`.

        Yields after each latent frame the new frames `[n, H, W, 3]`, float32 in `[0, 1]`: one after the video's first
        latent frame, four after each later one.
        """
        vae = self.vae
        x = vae.post_quant_conv(self._denormalise(latents).to(vae.dtype))
        for i in range(x.shape[2]):
            vae._conv_idx = [0]
            frames = vae.decoder(
                x[:, :, i : i + 1], feat_cache=vae._feat_map, feat_idx=vae._conv_idx, first_chunk=self.first
            )
            self.first = False
            if vae.config.patch_size is not None:
                frames = unpatchify(frames, patch_size=vae.config.patch_size)
            frames = torch.clamp(frames, min=-1.0, max=1.0)
            yield self.video_processor.postprocess_video(frames, output_type="np")[0]

    def close(self) -> None:
        """Drops the cached features. Safe at any point, also after an error."""
        self.vae.clear_cache()

    def _denormalise(self, latents: torch.Tensor) -> torch.Tensor:
        """From the transformer's scale to the VAE's, in the order of operations of diffusers' decode block."""
        shape = (1, self.vae.config.z_dim, 1, 1, 1)
        mean = torch.tensor(self.vae.config.latents_mean).view(shape).to(latents.device, latents.dtype)
        inverse_std = 1.0 / torch.tensor(self.vae.config.latents_std).view(shape).to(latents.device, latents.dtype)
        return latents / inverse_std + mean
