//! llama.cpp's slots, with the demo model: their KV goes to files and comes back.

use actix_web::dev::ServerHandle;
use pagetide::actors::live_settings::LiveSettings;
use pagetide::actors::runtime::Runtime;
use pagetide::config::{ApiKeyConfig, Config, DeviceKind, DtypeChoice};
use pagetide::http::server::{listen, serve};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::time::Duration;

const BLOCK_SIZE: usize = 4;
const PROMPT: &str = "The tide comes in and the tide goes out, and the pages are";

/// The demo model behind HTTP.
struct SlotServer {
    url: String,
    key: &'static str,
    client: reqwest::Client,
    live_settings: LiveSettings,
    stopper: ServerHandle,
    _runtime: Runtime,
}

fn config(folder: &Path) -> Config {
    let mut config = Config::default();
    config.model.path = "demo".into();
    config.model.dtype = DtypeChoice::Float32;
    config.device.kind = DeviceKind::Cpu;
    config.device.threads = 1;
    config.cache.block_size = BLOCK_SIZE as u32;
    config.cache.num_device_blocks = Some(300);
    config.swap.space_gib = Some(0.0);
    config.scheduler.max_num_seqs = 4;
    config.server.port = 0;
    config.server.workers = 1;
    config.server.slot_folder = folder.to_str().unwrap().into();
    config
}

impl SlotServer {
    fn start(config: &Config) -> Self {
        let runtime = Runtime::start(config, Box::new(|_, _, _| {})).unwrap();
        let listeners = listen(config).unwrap();
        let url = listeners.url().unwrap();
        let live_settings = runtime.live_settings(config.clone().into());
        let server = serve(runtime.handle(), live_settings.clone(), config, listeners, None).unwrap();
        let stopper = server.handle();
        actix_web::rt::spawn(server);
        Self { url, key: "", client: reqwest::Client::new(), live_settings, stopper, _runtime: runtime }
    }

    async fn stop(self) {
        self.stopper.stop(false).await;
    }

    async fn send(&self, path: &str, body: &Value) -> reqwest::Response {
        let request = self.client.post(format!("{}{path}", self.url)).json(body);
        let request = if self.key.is_empty() { request } else { request.bearer_auth(self.key) };
        request.send().await.unwrap()
    }

    async fn ok(&self, path: &str, body: Value) -> Value {
        let response = self.send(path, &body).await;
        let (status, answer): (_, Value) = (response.status(), response.json().await.unwrap());
        assert_eq!(status, 200, "{path} {body}: {answer}");
        answer
    }

    /// The status and the message of an error in llama.cpp's format.
    async fn refused(&self, path: &str, body: Value) -> (u64, String) {
        let response = self.send(path, &body).await;
        let (status, answer): (_, Value) = (response.status(), response.json().await.unwrap());
        let error = &answer["error"];
        assert_eq!(error["code"], status.as_u16(), "{path} {body}: {answer}");
        (error["code"].as_u64().unwrap(), error["message"].as_str().unwrap().to_owned())
    }

    async fn complete(&self, prompt: &str, slot: i64) -> Value {
        let body = json!({"prompt": prompt, "n_predict": 9, "temperature": 0, "ignore_eos": true, "id_slot": slot});
        self.ok("/completion", body).await
    }

    async fn act(&self, slot: u32, action: &str, filename: &str) -> Value {
        self.ok(&format!("/slots/{slot}?action={action}"), json!({"filename": filename})).await
    }

    async fn erase(&self, slot: u32) -> Value {
        self.ok(&format!("/slots/{slot}?action=erase"), Value::Null).await
    }

    async fn flush(&self) {
        while !self.live_settings.flush_caches().await.unwrap() {
            actix_web::rt::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

fn cached(answer: &Value) -> usize {
    answer["timings"]["cache_n"].as_u64().unwrap() as usize
}

fn number(answer: &Value, name: &str) -> usize {
    answer[name].as_u64().unwrap_or_else(|| panic!("{name} of {answer}")) as usize
}

/// Tokens of whole blocks.
fn whole(tokens: usize) -> usize {
    tokens / BLOCK_SIZE * BLOCK_SIZE
}

#[actix_web::test]
async fn a_saved_prefix_comes_back_also_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(&folder.path().join("new"));
    let server = SlotServer::start(&config);
    let first = server.complete(PROMPT, 1).await;
    assert_eq!((cached(&first), &first["id_slot"]), (0, &json!(1)));
    let num_prompt = number(&first, "tokens_evaluated");
    let saved = server.act(1, "save", "a.bin").await;
    // The last token has no KV.
    assert_eq!(number(&saved, "n_saved"), whole(num_prompt + 9 - 1));
    assert_eq!((&saved["id_slot"], &saved["filename"]), (&json!(1), &json!("a.bin")));
    assert!(saved["timings"]["save_ms"].as_f64().unwrap() > 0.0);
    let file = folder.path().join("new").join("a.bin");
    assert_eq!(fs::metadata(&file).unwrap().len() as usize, number(&saved, "n_written"));
    assert_eq!(fs::read_dir(file.parent().unwrap()).unwrap().count(), 1, "nothing is left over");

    // One token is computed at least.
    let most_cached = whole(num_prompt - 1);
    assert_eq!(cached(&server.complete(PROMPT, 1).await), most_cached);
    server.flush().await;
    let again = server.complete(PROMPT, 2).await;
    assert_eq!((cached(&again), &again["content"]), (0, &first["content"]));
    let erased = server.erase(2).await;
    assert_eq!((number(&erased, "n_erased"), &erased["id_slot"]), (number(&saved, "n_saved"), &json!(2)));
    assert_eq!(number(&server.erase(2).await, "n_erased"), 0);
    assert_eq!(cached(&server.complete(PROMPT, 2).await), 0, "it was erased");
    server.flush().await;
    for slot in [3, 3] {
        let restored = server.act(slot, "restore", "a.bin").await;
        assert_eq!(restored["n_restored"], saved["n_saved"]);
        assert_eq!((&restored["n_read"], &restored["id_slot"]), (&saved["n_written"], &json!(3)));
        assert!(restored["timings"]["restore_ms"].as_f64().unwrap() > 0.0);
    }
    let warm = server.complete(PROMPT, 3).await;
    assert_eq!((cached(&warm), &warm["content"]), (most_cached, &first["content"]));
    server.stop().await;

    let server = SlotServer::start(&config);
    let restored = server.act(0, "restore", "a.bin").await;
    assert_eq!(restored["n_restored"], saved["n_saved"]);
    // The slot holds it.
    assert_eq!(server.act(0, "save", "b.bin").await["n_saved"], saved["n_saved"]);
    assert_eq!(fs::read(&file).unwrap(), fs::read(file.with_file_name("b.bin")).unwrap());
    let warm = server.complete(PROMPT, 0).await;
    assert_eq!((cached(&warm), &warm["content"]), (most_cached, &first["content"]));
    server.stop().await;

    let mut other = config.clone();
    other.cache.block_size = 8;
    let server = SlotServer::start(&other);
    let (status, message) = server.refused("/slots/0?action=restore", json!({"filename": "a.bin"})).await;
    assert!(status == 400 && message.contains("cache.block_size"), "{message}");
    server.stop().await;
}

/// What the device has evicted is saved from the swap pool.
#[actix_web::test]
async fn both_tiers_are_saved() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path());
    config.swap.space_gib = Some(0.05);
    let server = SlotServer::start(&config);
    let first = server.complete(PROMPT, 0).await;
    let num_blocks = (number(&first, "tokens_evaluated") + 9).div_ceil(BLOCK_SIZE);
    server.stop().await;
    // Room for one completion.
    config.cache.num_device_blocks = Some(num_blocks as u32 + 1);
    config.model.max_model_len = Some(((num_blocks + 1) * BLOCK_SIZE) as u32);
    let server = SlotServer::start(&config);
    server.complete(PROMPT, 0).await;
    let saved = server.act(0, "save", "a.bin").await;
    let other: String = PROMPT.chars().rev().take(30).collect();
    server.complete(&other, 1).await;
    let later = server.act(0, "save", "b.bin").await;
    assert_eq!((&later["n_saved"], &later["n_written"]), (&saved["n_saved"], &saved["n_written"]));
    assert_eq!(fs::read(folder.path().join("a.bin")).unwrap(), fs::read(folder.path().join("b.bin")).unwrap());
    // It makes room for itself.
    assert_eq!(server.act(2, "restore", "b.bin").await["n_restored"], saved["n_saved"]);
    let warm = server.complete(PROMPT, 2).await;
    assert_eq!(warm["content"], first["content"]);
    assert!(cached(&warm) > 0);
    server.erase(2).await;
    assert_eq!(cached(&server.complete(PROMPT, 2).await), 0, "both tiers have forgotten it");
    server.stop().await;
}

#[actix_web::test]
async fn requests_of_all_paths_of_llama_cpp_use_slots() {
    let folder = tempfile::tempdir().unwrap();
    let server = SlotServer::start(&config(folder.path()));
    // The first idle slot is taken where none is asked for.
    assert_eq!(server.complete(PROMPT, -1).await["id_slot"], 0);
    assert!(number(&server.act(0, "save", "a").await, "n_saved") > 0);
    let chat = json!({"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 3, "id_slot": 2});
    server.ok("/v1/chat/completions", chat).await;
    assert!(number(&server.act(2, "save", "b").await, "n_saved") > 0);
    let streamed = json!({"prompt": PROMPT, "n_predict": 3, "stream": true, "id_slot": 1});
    server.send("/completion", &streamed).await.text().await.unwrap();
    assert!(number(&server.act(1, "save", "c").await, "n_saved") > 0);
    // Nothing can be found again of a prompt that is not cached: the slot keeps what it has.
    let before = server.act(1, "save", "c").await;
    let apart = json!({"prompt": "hi", "n_predict": 3, "cache_prompt": false, "id_slot": 1});
    server.ok("/completion", apart).await;
    assert_eq!(server.act(1, "save", "c").await["n_saved"], before["n_saved"]);
    // A slot that nothing has used holds nothing.
    assert_eq!(server.act(3, "save", "d").await["n_saved"], 0);
    assert_eq!(server.act(3, "restore", "d").await["n_restored"], 0);
    server.stop().await;
}

#[actix_web::test]
async fn wrong_names_numbers_and_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let server = SlotServer::start(&config(folder.path()));
    server.complete(PROMPT, 0).await;
    let saved = server.act(0, "save", "a.bin").await;
    for name in ["", "..", "../a.bin", "a/b", "a\\b", "/etc/passwd", "a\n", "a.", " a", &"x".repeat(256)] {
        for action in ["save", "restore"] {
            let (status, message) =
                server.refused(&format!("/slots/0?action={action}"), json!({"filename": name})).await;
            assert!(status == 400 && message.contains("filename"), "{name:?}: {message}");
        }
    }
    for body in [json!({}), json!({"filename": 5}), json!([])] {
        assert_eq!(server.refused("/slots/0?action=save", body).await.0, 400);
    }
    for path in
        ["/slots/4?action=erase", "/slots/4294967296?action=erase", "/slots/4?action=save", "/slots/x?action=erase"]
    {
        let (status, message) = server.refused(path, json!({"filename": "a.bin"})).await;
        assert!(status == 400 && message.contains("id"), "{path}: {message}");
    }
    let (status, message) = server.refused("/completion", json!({"prompt": "a", "id_slot": 4})).await;
    assert!(status == 400 && message.contains("id_slot"), "{message}");

    let file = folder.path().join("a.bin");
    let bytes = fs::read(&file).unwrap();
    let mut damaged = bytes.clone();
    damaged[bytes.len() / 2] ^= 1;
    fs::write(folder.path().join("damaged"), damaged).unwrap();
    fs::write(folder.path().join("cut"), &bytes[..bytes.len() / 2]).unwrap();
    fs::write(folder.path().join("foreign"), b"GGUF and so on").unwrap();
    fs::create_dir(folder.path().join("folder")).unwrap();
    server.flush().await;
    for name in ["damaged", "cut", "foreign", "folder", "nothing"] {
        let (status, message) = server.refused("/slots/1?action=restore", json!({"filename": name})).await;
        assert!(status == 400 && message.contains("invalid slot save file"), "{name}: {message}");
    }
    assert_eq!(server.act(1, "save", "b.bin").await["n_saved"], 0, "nothing has changed");
    assert_eq!(server.act(1, "restore", "a.bin").await["n_restored"], saved["n_saved"]);
    // The disk refuses.
    fs::remove_dir_all(folder.path()).unwrap();
    fs::write(folder.path(), b"a file").unwrap();
    let (status, message) = server.refused("/slots/1?action=save", json!({"filename": "a.bin"})).await;
    assert!(status == 500 && message.contains("cannot be read or written"), "{message}");
    fs::remove_file(folder.path()).unwrap();
    server.stop().await;
}

#[actix_web::test]
async fn keys_have_slots_and_files_of_their_own() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path());
    let key = |key: &str| ApiKeyConfig { key: key.into(), ..ApiKeyConfig::default() };
    config.server.api_keys = vec![key("one"), key("two")];
    let mut server = SlotServer::start(&config);
    server.key = "one";
    let first = server.complete(PROMPT, 0).await;
    let saved = server.act(0, "save", "a.bin").await;
    assert!(number(&saved, "n_saved") > 0);
    server.key = "two";
    let (status, message) = server.refused("/slots/0?action=restore", json!({"filename": "a.bin"})).await;
    assert!(status == 400 && message.contains("no such file"), "{message}");
    assert_eq!(server.act(0, "save", "b.bin").await["n_saved"], 0, "it has not used the slot");
    assert_eq!(number(&server.erase(0).await, "n_erased"), 0);
    // Copied into the other's folder, it holds no secret of the one: its tokens are named anew.
    let folders: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(folders.len(), 2);
    let of_one = folders.iter().find(|folder| folder.join("a.bin").exists()).unwrap();
    let of_two = folders.iter().find(|folder| folder.join("b.bin").exists()).unwrap();
    fs::copy(of_one.join("a.bin"), of_two.join("a.bin")).unwrap();
    server.key = "one";
    server.erase(0).await;
    server.key = "two";
    server.act(0, "restore", "a.bin").await;
    let warm = server.complete(PROMPT, 0).await;
    assert!(cached(&warm) > 0 && warm["content"] == first["content"]);
    server.key = "one";
    assert_eq!(cached(&server.complete(PROMPT, 0).await), 0);
    server.stop().await;
}

#[actix_web::test]
async fn without_a_prefix_cache_nothing_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path());
    config.cache.enable_prefix_caching = false;
    let server = SlotServer::start(&config);
    server.complete(PROMPT, 0).await;
    for action in ["save", "restore"] {
        let (status, message) =
            server.refused(&format!("/slots/0?action={action}"), json!({"filename": "a.bin"})).await;
        assert!(status == 501 && message.contains("cache.enable_prefix_caching"), "{message}");
    }
    server.stop().await;
}
