use serde_json::json;

use super::*;

const BOUNDS: InputBounds = InputBounds {
    largest: ByteCount(100),
    total: ByteCount(10 * LEAST),
    idle: Duration::from_hours(1),
};

fn open(dir: &Path) -> Arc<Inputs> {
    Arc::new(Inputs::open(dir, BOUNDS, ["image".to_owned()]).unwrap())
}

fn names(dir: &Path) -> BTreeSet<String> {
    let files = std::fs::read_dir(dir).unwrap();
    files
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect()
}

/// An input as a server before left it.
fn lay(dir: &Path, bytes: &[u8]) -> InputName {
    let name = InputName::new(blake3::hash(bytes));
    std::fs::write(dir.join(name.file()), bytes).unwrap();
    std::fs::write(dir.join(format!("{}{TYPE}", name.file())), "image/png").unwrap();
    name
}

#[test]
fn what_was_complete_is_there_again_and_the_rest_is_swept() {
    let dir = tempfile::tempdir().unwrap();
    let whole = lay(dir.path(), b"a cat");
    let untyped = lay(dir.path(), b"a dog");
    std::fs::remove_file(dir.path().join(format!("{}{TYPE}", untyped.file()))).unwrap();
    let unnamed = lay(dir.path(), b"a bird");
    std::fs::remove_file(dir.path().join(unnamed.file())).unwrap();
    std::fs::write(dir.path().join(format!("7{PART}")), b"half a c").unwrap();
    std::fs::write(dir.path().join("README"), b"somebody else's").unwrap();

    let inputs = open(dir.path());
    let left = [
        whole.file().to_owned(),
        format!("{}{TYPE}", whole.file()),
        "README".to_owned(),
    ];
    assert_eq!(names(dir.path()), BTreeSet::from(left));
    let found = inputs.find(&whole.to_string()).unwrap();
    assert_eq!((found.nbytes, found.media_type.as_str()), (5, "image/png"));
    assert_eq!(inputs.usage(), (1, LEAST, 10 * LEAST));
    for name in [untyped, unnamed] {
        assert!(matches!(
            inputs.find(&name.to_string()),
            Err(InputError::Unknown { .. })
        ));
    }
}

#[test]
fn a_job_pins_all_its_inputs_or_none() {
    let dir = tempfile::tempdir().unwrap();
    let name = lay(dir.path(), b"a cat").to_string();
    let inputs = Inputs::open(dir.path(), BOUNDS, ["first".to_owned(), "last".to_owned()]).unwrap();
    let inputs = Arc::new(inputs);
    let pinned = || {
        lock(&inputs.state)
            .entries
            .values()
            .map(|entry| entry.pins)
            .sum::<usize>()
    };
    let pin = |params: Value| inputs.pin(params.as_object().unwrap());

    let pins = pin(json!({"first": name, "last": name, "prompt": "blake3:x"})).unwrap();
    assert_eq!(pinned(), 2);
    drop(pins);
    assert_eq!(pinned(), 0);
    let error = pin(json!({"first": name, "last": name.replace("blake3", "sha256")})).unwrap_err();
    assert!(
        matches!(&error, InputError::UnknownParam { param, .. } if param == "last"),
        "{error}"
    );
    assert_eq!(pinned(), 0);
    assert!(pin(json!({"first": "", "last": name})).is_ok());
}

#[test]
fn stages_are_told_the_files_of_parameters_that_are_inputs() {
    let dir = tempfile::tempdir().unwrap();
    let name = lay(dir.path(), b"a cat");
    let inputs = open(dir.path());
    let files = |params: Value| inputs.files(&params.to_string());
    let file = |path: &str| v1::InputFile {
        param: "image".to_owned(),
        path: path.to_owned(),
    };
    let path = dir.path().join(name.file());
    assert_eq!(
        files(json!({"image": name.to_string(), "prompt": name.to_string()})),
        [file(path.to_str().unwrap())]
    );
    assert_eq!(files(json!({"image": ""})), [file("")]);
    assert_eq!(files(json!({"image": "../../etc/passwd"})), [file("")]);
    assert_eq!(files(json!({"prompt": "x"})), []);
}

#[test]
fn a_path_that_workers_cannot_be_told_is_refused() {
    use std::os::unix::ffi::OsStrExt;
    let dir = tempfile::tempdir().unwrap();
    let strange = dir.path().join(std::ffi::OsStr::from_bytes(b"\xff"));
    for wrong in [strange.as_path(), "inputs".as_ref()] {
        let error = Inputs::open(wrong, BOUNDS, ["image".to_owned()]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
        assert!(!wrong.exists());
    }
    Inputs::open(&strange, BOUNDS, []).unwrap();
}

#[tokio::test]
async fn one_that_goes_while_it_is_asked_for_is_unknown() {
    let dir = tempfile::tempdir().unwrap();
    let name = lay(dir.path(), b"a cat");
    let inputs = open(dir.path());
    std::fs::remove_file(inputs.path(&name)).unwrap();
    let error = inputs.open_file(&name.to_string()).await.unwrap_err();
    assert!(matches!(error, InputError::Unknown { .. }), "{error}");
}
