use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::client::{Artefact, Client, Job, JobResult};
use crate::exit::Fault;
use crate::output::{Output, bytes};

/// Where the results of the job go.
#[derive(Debug)]
pub(super) struct Outputs<'a> {
    files: &'a [PathBuf],
    timeline: Option<&'a Path>,
}

impl<'a> Outputs<'a> {
    /// Finds out now, not after minutes of work, that nothing can be written there.
    pub(super) fn check(files: &'a [PathBuf], timeline: Option<&'a Path>) -> Result<Self, Fault> {
        for file in files.iter().map(PathBuf::as_path).chain(timeline) {
            if is_directory(file) {
                continue;
            }
            let parent = file.parent().filter(|parent| !parent.as_os_str().is_empty());
            if let Some(parent) = parent.filter(|parent| !parent.is_dir()) {
                return Err(Fault::usage(format!("there is no directory {}", parent.display())));
            }
        }
        if let Some(timeline) = timeline
            && !matches!(timeline.extension().and_then(|ext| ext.to_str()), Some("html" | "json"))
        {
            return Err(Fault::usage(format!(
                "--timeline {} must end in .html or .json",
                timeline.display()
            )));
        }
        Ok(Self { files, timeline })
    }

    /// Saves everything that was asked for and prints what there is.
    pub(super) async fn save(&self, client: &Client, job: &Job, output: &Output) -> Result<(), Fault> {
        let path = format!("/v1/jobs/{}/result", job.id);
        let document: Value = client.get(&path).await?;
        let result: JobResult = serde_json::from_value(document.clone())?;
        let mut saved = Vec::new();
        for out in self.files {
            for (artefact, file) in choose(&result.artefacts, out)? {
                if let Some(parent) = file.parent().filter(|_| is_directory(out)) {
                    std::fs::create_dir_all(parent)?;
                }
                let written = client.save(&artefact.url, &file).await?;
                if output.json {
                    saved.push(json!({"name": artefact.name, "file": file, "nbytes": written}));
                } else {
                    output.data(file.display())?;
                    output.topic("saved", format_args!("{} ({})", file.display(), bytes(written)));
                }
            }
        }
        self.save_timeline(client, &job.id, output).await?;
        if output.json {
            return output.document(&json!({"job": job, "result": document, "saved": saved}));
        }
        if self.files.is_empty() {
            for artefact in &result.artefacts {
                output.data(format_args!("{}{}", client.url()?, artefact.url))?;
            }
        }
        Ok(())
    }

    pub(super) async fn save_timeline(&self, client: &Client, job: &str, output: &Output) -> Result<(), Fault> {
        let Some(file) = self.timeline else { return Ok(()) };
        let page = if file.extension().is_some_and(|ext| ext == "html") {
            ".html"
        } else {
            ""
        };
        client.save(&format!("/v1/jobs/{job}/timeline{page}"), file).await?;
        output.topic("saved", format_args!("{}", file.display()));
        Ok(())
    }
}

fn is_directory(path: &Path) -> bool {
    path.is_dir() || path.as_os_str().to_string_lossy().ends_with('/')
}

/// Which artefact goes to which file.
fn choose<'a>(artefacts: &'a [Artefact], out: &Path) -> Result<Vec<(&'a Artefact, PathBuf)>, Fault> {
    if is_directory(out) {
        // A name of the pipeline's choosing may not lead out of the directory.
        let name = |artefact: &Artefact| Path::new(&artefact.name).file_name().map(PathBuf::from);
        let files = artefacts
            .iter()
            .filter_map(|artefact| Some((artefact, out.join(name(artefact)?))));
        return Ok(files.collect());
    }
    let same_name = |artefact: &&Artefact| out.file_name().is_some_and(|name| name == artefact.name.as_str());
    let same_kind =
        |artefact: &&Artefact| out.extension().is_some() && Path::new(&artefact.name).extension() == out.extension();
    let only = || (artefacts.len() == 1 && out.extension().is_none()).then(|| &artefacts[0]);
    let found = artefacts
        .iter()
        .find(same_name)
        .or_else(|| artefacts.iter().find(same_kind))
        .or_else(only);
    match found {
        Some(artefact) => Ok(vec![(artefact, out.to_owned())]),
        None => {
            let names: Vec<&str> = artefacts.iter().map(|artefact| artefact.name.as_str()).collect();
            Err(Fault::failed(format!(
                "no artefact fits --out {}: the job made {}",
                out.display(),
                names.join(", ")
            )))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn artefacts(names: &[&str]) -> Vec<Artefact> {
        let artefact = |name: &&str| Artefact {
            name: (*name).to_owned(),
            url: format!("/{name}"),
        };
        names.iter().map(artefact).collect()
    }

    #[test]
    fn the_extension_chooses() {
        let all = artefacts(&["video.mp4", "first.png", "frames.png"]);
        let chosen = |out: &str| choose(&all, Path::new(out)).map(|found| found[0].0.name.clone());
        assert_eq!(chosen("cat.mp4").unwrap(), "video.mp4");
        assert_eq!(chosen("cat.png").unwrap(), "first.png");
        assert_eq!(chosen("x/frames.png").unwrap(), "frames.png");
        let error = chosen("cat.gif").unwrap_err().error.to_string();
        assert_eq!(
            error,
            "no artefact fits --out cat.gif: the job made video.mp4, first.png, frames.png"
        );
        assert!(chosen("cat").is_err());
        let one = artefacts(&["video.mp4"]);
        assert_eq!(choose(&one, Path::new("cat")).unwrap()[0].0.name, "video.mp4");
    }

    #[test]
    fn a_directory_takes_all_and_names_stay_inside() {
        let all = artefacts(&["video.mp4", "../../etc/passwd"]);
        let files: Vec<PathBuf> = choose(&all, Path::new("out/"))
            .unwrap()
            .into_iter()
            .map(|(_, file)| file)
            .collect();
        assert_eq!(files, [PathBuf::from("out/video.mp4"), PathBuf::from("out/passwd")]);
    }
}
