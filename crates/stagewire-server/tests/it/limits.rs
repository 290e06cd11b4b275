//! Bounds that a pipeline declares, and what goes above them.

use serde_json::json;

use crate::site::{Site, until};
use crate::stages::Workers;

#[tokio::test(flavor = "multi_thread")]
async fn an_output_above_max_payload_fails_its_attempt_with_both_sizes() {
    for mut site in [Site::new(), Site::stored()] {
        // Embeddings have a byte for each of the prompt.
        let bounded = "name = \"encode\"\nmax-payload = \"10\"\nmax-attempts = 3\n";
        site.config = site.config.replace("name = \"encode\"\n", bounded);
        let api = site.start().await;
        let workers = Workers::attach(&site.run_dir()).await;
        let job = api.submit("longer than ten").await;
        let shown = api.until(&job, &["succeeded", "failed"]).await;
        let failure = &shown["failure"];
        assert_eq!(failure["reason"], "stage.raised", "the stage's own error: {shown}");
        let message = failure["message"].as_str().unwrap();
        for part in [
            "of stage encode has 15 B",
            "at most 10 B are allowed",
            "\"max-payload\"",
        ] {
            assert!(message.contains(part), "{part} in {message}");
        }
        until("nothing to be held", || async {
            let (_, stats) = api.get("/v1/stats").await;
            let held = (&stats["live_payloads"], &stats["store"]["payloads"]);
            (held == (&json!(0), &json!(0)) && workers.live() == 0).then_some(())
        })
        .await;
        let fits = api.submit("a red cat").await;
        let shown = api.until(&fits, &["succeeded", "failed"]).await;
        assert_eq!(shown["state"], "succeeded", "{shown}");
        workers.close().await;
        api.stop().await;
    }
}
