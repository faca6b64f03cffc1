use super::layers::{Origin, Problems, Resolved, Sources, resolve};
use super::reference::{common_file, reference_file};
use super::settings::{SECTIONS, SETTINGS, find};
use super::value::{SettingKind, Value};
use super::*;
use std::path::PathBuf;

fn sources(file: &str, env: &[(&str, &str)], flags: &[(&str, &str, &str)]) -> Sources {
    Sources {
        file: Some((PathBuf::from("p.toml"), file.to_owned())),
        env: env.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect(),
        flags: flags.iter().map(|(f, k, v)| (f.to_string(), k.to_string(), v.to_string())).collect(),
    }
}

fn from_file(text: &str) -> Result<Resolved, Problems> {
    resolve(&sources(text, &[], &[]))
}

fn problems_of(result: Result<Resolved, Problems>) -> Vec<String> {
    result.expect_err("the configuration is wrong").0.iter().map(ToString::to_string).collect()
}

#[test]
fn flags_come_before_env_before_file_before_defaults() {
    let file = "[server]\nport = 1\nhost = \"a\"\nretry_after_s = 7\n";
    let env = [("PAGETIDE_SERVER__PORT", "2"), ("PAGETIDE_SERVER__HOST", "b"), ("PAGETIDE_PORT", "tcp://x")];
    let resolved = resolve(&sources(file, &env, &[("--port", "server.port", "3")])).unwrap();
    let server = &resolved.config.server;
    assert_eq!((server.port, server.host.as_str(), server.retry_after_s, server.workers), (3, "b", 7, 0));
    assert_eq!(*resolved.origin("server.port"), Origin::Flag("--port".into()));
    assert_eq!(*resolved.origin("server.host"), Origin::Env("PAGETIDE_SERVER__HOST".into()));
    assert_eq!(*resolved.origin("server.retry_after_s"), Origin::File { path: "p.toml".into(), line: 4 });
    assert_eq!(*resolved.origin("server.workers"), Origin::Default);
}

#[test]
fn every_problem_of_a_file_is_reported_with_its_line() {
    let text = "\
[server]
prot = 9000
port = 70000
host = 5
[cache]
block_size = 512
enable_prefix_caching = \"yes\"

[schedular]
max_num_seqs = 1
[scheduler]
policy = \"lifo\"
watermark = 0.9
max_num_seqs = {}
[model.path]
a = 1
[swap]
space_gib = -1
[device]
memory_utilization = 0
";
    assert_eq!(
        problems_of(from_file(text)),
        [
            "p.toml:2: server.prot: unknown key; did you mean 'server.port'?",
            "p.toml:3: server.port: 70000 is out of range: a whole number from 0 to 65535",
            "p.toml:4: server.host: 5 (a whole number) is not a string",
            "p.toml:6: cache.block_size: 512 is out of range: a whole number from 1 to 256",
            "p.toml:7: cache.enable_prefix_caching: \"yes\" (a string) is not true or false",
            "p.toml:9: schedular: unknown section; did you mean [scheduler]?",
            "p.toml:12: scheduler.policy: 'lifo' is not one of fcfs, priority",
            "p.toml:13: scheduler.watermark: 0.9 is out of range: a number from 0 to 0.5",
            "p.toml:14: scheduler.max_num_seqs: {} (a table) is not a whole number from 1 to 65536",
            "p.toml:15: model.path: a table is not a string",
            "p.toml:18: swap.space_gib: -1 is out of range: a number from 0 to 65536, or \"auto\"",
            "p.toml:20: device.memory_utilization: 0 is out of range: a number above 0, up to 1, or \"auto\"",
        ]
    );
}

#[test]
fn a_key_in_the_wrong_place_is_pointed_to_the_right_one() {
    assert_eq!(problems_of(from_file("port = 1")), ["p.toml:1: port: unknown section; did you mean 'server.port'?"]);
    assert_eq!(
        problems_of(from_file("[cache]\nmax_num_seqs = 1")),
        ["p.toml:2: cache.max_num_seqs: unknown key; did you mean 'scheduler.max_num_seqs'?"]
    );
    assert_eq!(
        problems_of(from_file("server = 1")),
        ["p.toml:1: server: this is a section: write [server] and its keys below"]
    );
}

#[test]
fn malformed_toml_is_reported_with_its_position() {
    let problems = problems_of(from_file("[server]\nport = = 1\n"));
    assert_eq!(problems.len(), 1, "{problems:?}");
    assert!(problems[0].starts_with("p.toml:2: not TOML: "), "{problems:?}");
    assert!(problems[0].ends_with("(column 8)"), "{problems:?}");
    assert!(
        problems_of(from_file("[server]\nport = 1\nport = 2\n"))[0].starts_with("p.toml:3: not TOML: duplicate key")
    );
}

#[test]
fn mistakes_in_environment_and_flags_name_where_they_were_made() {
    let env = [("PAGETIDE_SERVER__PROT", "1"), ("PAGETIDE_CACHE__BLOCK_SIZE", "0")];
    let flags = [("--set server.hots", "server.hots", "x"), ("--max-num-seqs", "scheduler.max_num_seqs", "many")];
    assert_eq!(
        problems_of(resolve(&sources("", &env, &flags))),
        [
            "PAGETIDE_SERVER__PROT: unknown setting; did you mean PAGETIDE_SERVER__PORT?",
            "PAGETIDE_CACHE__BLOCK_SIZE: cache.block_size: 0 is out of range: a whole number from 1 to 256",
            "--set server.hots: unknown key; did you mean 'server.host'?",
            "--max-num-seqs: scheduler.max_num_seqs: 'many' is not a whole number from 1 to 65536",
        ]
    );
}

#[test]
fn flags_and_environment_take_lists_as_in_toml() {
    let origins = |env: &[(&str, &str)], flags: &[(&str, &str, &str)]| {
        resolve(&sources("", env, flags)).map(|resolved| resolved.config.server.cors_allowed_origins)
    };
    const KEY: &str = "server.cors_allowed_origins";
    let both = ["https://a.example".to_owned(), "https://b.example".to_owned()];
    let as_toml = r#" ["https://a.example", 'https://b.example'] "#;
    assert_eq!(origins(&[], &[("--set", KEY, r#"["*"]"#)]).unwrap(), ["*"]);
    assert_eq!(origins(&[], &[("--set", KEY, as_toml)]).unwrap(), both);
    assert_eq!(origins(&[("PAGETIDE_SERVER__CORS_ALLOWED_ORIGINS", as_toml)], &[]).unwrap(), both);
    assert_eq!(origins(&[], &[("--set", KEY, &both[0]), ("--set", KEY, r#"["https://b.example"]"#)]).unwrap(), both);
    for (wrong, why) in [("[\"a", "it is not a list as in TOML: "), ("[5]", "a list with an entry of another type")] {
        let problems = problems_of(resolve(&sources("", &[], &[("--set", KEY, wrong)])));
        assert!(problems.len() == 1 && problems[0].contains(why), "{problems:?}");
    }
}

#[test]
fn relations_between_settings_are_checked_across_layers() {
    let flags = [("--max-num-batched-tokens", "scheduler.max_num_batched_tokens", "100")];
    assert_eq!(
        problems_of(resolve(&sources("[scheduler]\nmax_num_seqs = 200", &[], &flags))),
        ["--max-num-batched-tokens: scheduler.max_num_batched_tokens: 100 is less than scheduler.max_num_seqs = 200 \
          (p.toml:2): each running sequence needs one token per step"]
    );
    assert_eq!(
        problems_of(from_file("[swap]\nspace_gib = 0\n[scheduler]\npreemption_mode = \"swap\"")),
        ["p.toml:4: scheduler.preemption_mode: 'swap' needs swap space, but swap.space_gib = 0 (p.toml:2)"]
    );
    assert_eq!(
        problems_of(from_file("[model]\nload_format = \"dummy\"\nquantization = \"q4_0\"")),
        ["p.toml:3: model.quantization: 'q4_0' needs a checkpoint's weights, but model.load_format = dummy (p.toml:2)"]
    );
    assert_eq!(
        problems_of(from_file("[device]\nbatch_invariant = true\nfp8_activations = true")),
        [
            "p.toml:3: device.fp8_activations: is true, and device.batch_invariant too (p.toml:2): results of FP8 products \
          depend on the rows of the step"
        ]
    );
    assert!(from_file("[server]\napi_keys = [\"\"]").is_err());
    for (origin, is_right) in [
        ("*", true),
        ("https://a.example", true),
        ("http://localhost:3000", true),
        ("localhost", true),
        ("localhost:3000", false),
        ("https://a.example/", false),
        ("a.example", false),
        ("https://*.example", false),
        ("", false),
    ] {
        let read = from_file(&format!("[server]\ncors_allowed_origins = [\"{origin}\"]"));
        assert_eq!(read.is_ok(), is_right, "{origin}");
    }
    // Beside other problems, but not on top of one of the same keys.
    let both = problems_of(from_file("[server]\nprot = 1\n[scheduler]\nmax_num_batched_tokens = 100"));
    assert_eq!(both.len(), 2, "{both:?}");
    let one = problems_of(from_file("[scheduler]\nmax_num_seqs = 0\nmax_num_batched_tokens = 100"));
    assert_eq!(one.len(), 1, "{one:?}");
}

#[test]
fn auto_is_resolved_where_the_device_is_known() {
    let scheduler = SchedulerSettings { max_num_seqs: 1000, ..Default::default() };
    assert_eq!((scheduler.batched_tokens(false), scheduler.batched_tokens(true)), (1000, 2048));
    let resolved = from_file("[model]\nmax_model_len = \"auto\"\n[server]\nserved_model_name = \"auto\"").unwrap();
    assert_eq!(resolved.config.model.max_model_len, None);
    assert_eq!(resolved.config.server.served_model_name, None);
}

#[test]
fn steps_are_planned_ahead_on_a_gpu_and_where_that_is_asked_for() {
    let overlaps = |choice: &str| {
        let scheduler = from_file(&format!("[scheduler]\noverlap = \"{choice}\"")).unwrap().config.scheduler;
        (scheduler.overlaps(false), scheduler.overlaps(true))
    };
    assert_eq!([overlaps("auto"), overlaps("on"), overlaps("off")], [(false, true), (true, true), (false, false)]);
}

#[test]
fn lists_add_up_over_flags_and_replace_lower_layers() {
    let flags = [("--api-key", "server.api_keys", "a"), ("--api-key", "server.api_keys", "b")];
    let file = "[server]\napi_keys = [\"old\"]";
    let config = resolve(&sources(file, &[], &flags)).unwrap().config;
    assert_eq!(config.server.api_keys, ["a", "b"]);
    let env = [("PAGETIDE_SERVER__API_KEYS", "x, y")];
    assert_eq!(resolve(&sources(file, &env, &[])).unwrap().config.server.api_keys, ["x", "y"]);
}

#[test]
fn a_key_stands_in_the_list_once() {
    let file = "[server]\napi_keys = [\"hush\", \"b\", {key = \"hush\", name = \"ann\"}]";
    let problems = problems_of(from_file(file));
    let [problem] = &problems[..] else { panic!("{problems:?}") };
    assert!(problem.contains("server.api_keys: entry 3 repeats the key"), "{problem}");
    assert!(!problem.contains("hush"), "{problem}");
}

#[test]
fn show_says_where_each_value_came_from_and_hides_secrets() {
    let env = [("PAGETIDE_SERVER__API_KEYS", "hush,hush2")];
    let shown = resolve(&sources("[swap]\nspace_gib = 2", &env, &[("--port", "server.port", "9")])).unwrap().show();
    let line = |name: &str| {
        let line = shown.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(line("port"), "port = 9 # --port");
    assert_eq!(line("space_gib"), "space_gib = 2.0 # p.toml:2");
    assert_eq!(line("host"), "host = \"127.0.0.1\" # default");
    assert_eq!(line("api_keys"), "api_keys = [\"(secret)\", \"(secret)\"] # PAGETIDE_SERVER__API_KEYS");
    assert!(!shown.contains("hush"));
    // The output is a valid configuration file.
    let file = shown.replacen("(secret)", "k", 1).replacen("(secret)", "l", 1);
    assert_eq!(from_file(&file).unwrap().config.server.port, 9);
}

#[test]
fn secrets_are_not_in_errors() {
    let problems = problems_of(from_file("[server]\napi_keys = \"hush\"\nadmin_key = 3"));
    let keys = "api_keys: the value is not a list of strings, or of tables {key, name, requests_per_minute, \
                tokens_per_minute, max_requests, max_connections}";
    let shown = [keys, "admin_key: the value is not a string"];
    assert_eq!(problems.len(), 2);
    assert!(problems.iter().zip(shown).all(|(problem, shown)| problem.ends_with(shown)), "{problems:?}");
}

#[test]
fn a_change_is_checked_against_the_other_settings() {
    let resolved = from_file("[server]\nadmin_key = \"hush\"\n[swap]\nspace_gib = 0\nmax_space_gib = 2").unwrap();
    let change = |key: &str, json: serde_json::Value| {
        let setting = find(key).unwrap();
        resolved.with(vec![(setting, setting.kind.read_json(&json).unwrap(), Origin::Admin)])
    };
    let changed = change("swap.space_gib", serde_json::json!(2)).unwrap();
    assert_eq!((changed.config.swap.space_gib, changed.origin("swap.space_gib")), (Some(2.0), &Origin::Admin));
    assert_eq!(changed.origin("swap.max_space_gib"), resolved.origin("swap.max_space_gib"));
    assert!(changed.show().contains("# POST /admin/config") && !changed.show().contains("hush"));
    for (key, value, says) in [
        ("swap.space_gib", serde_json::json!(2.5), "2.5 is more than swap.max_space_gib = 2 (p.toml:5)"),
        ("scheduler.preemption_mode", "swap".into(), "'swap' needs swap space"),
        ("server.api_keys", serde_json::json!(["hush"]), "is also in server.api_keys"),
    ] {
        let problems = problems_of(change(key, value));
        assert!(problems.len() == 1 && problems[0].contains(says), "{problems:?}");
    }
}

#[test]
fn a_model_can_have_several_names() {
    let names = |file: &str, flags: &[(&str, &str, &str)]| {
        let resolved = resolve(&sources(file, &[], flags));
        resolved.map(|resolved| resolved.config.server.served_model_name)
    };
    const KEY: &str = "server.served_model_name";
    let two = Some(vec!["a".to_owned(), "b/c".to_owned()]);
    assert_eq!(names("[server]\nserved_model_name = [\"a\", \"b/c\"]", &[]).unwrap(), two);
    assert_eq!(names("[server]\nserved_model_name = \"a\"", &[]).unwrap(), Some(vec!["a".to_owned()]));
    assert_eq!(names("[server]\nserved_model_name = \"auto\"", &[]).unwrap(), None);
    assert_eq!(names("", &[("--set", KEY, "a"), ("--set", KEY, "b/c")]).unwrap(), two);
    assert_eq!(names("", &[("--set", KEY, "a,b/c")]).unwrap(), two);
    assert!(problems_of(resolve(&sources("[server]\nserved_model_name = []", &[], &[])))[0].contains("not be empty"));
}

#[test]
fn an_unknown_surface_is_refused() {
    let problem = problems_of(from_file("[server]\nsurfaces = [\"openai\", \"gopher\"]")).remove(0);
    assert!(problem.contains("a list with 'gopher' is not a list of openai, anthropic"), "{problem}");
}

#[test]
fn a_misspelt_log_level_is_refused() {
    assert!(from_file("[log]\nlevel = \"info,pagetide::actors=debug\"").is_ok());
    assert!(problems_of(from_file("[log]\nlevel = \"inof\""))[0].contains("'inof' is neither one of off, error"));
}

/// Each setting's kind, field, default and section fit together.
#[test]
fn the_table_agrees_with_the_struct() {
    for setting in SETTINGS {
        let default = setting.default();
        let mut config = Config::default();
        (setting.store)(&mut config, default.clone());
        assert_eq!(config, Config::default(), "{}", setting.key);
        let text = match &default {
            Value::List(texts) => texts.join(","),
            Value::Keys(_) => String::new(),
            Value::Text(text) => text.clone(),
            Value::Auto => "auto".into(),
            other => other.to_string(),
        };
        assert_eq!(setting.kind.parse(&text), Ok(default), "{}: its default is in its range", setting.key);
        assert!(SECTIONS.iter().any(|(name, _)| *name == setting.section()), "{}", setting.key);
        let others = match setting.kind {
            SettingKind::Int { min, max, .. } => vec![Value::Int(min), Value::Int(max)],
            SettingKind::Float { max, .. } => vec![Value::Float(max)],
            SettingKind::Bool => vec![Value::Bool(false), Value::Bool(true)],
            SettingKind::Choice(words) => words.iter().map(|word| Value::Text(word.to_string())).collect(),
            SettingKind::Text { .. } => vec![Value::Text("x".into())],
            SettingKind::List { words: [], .. } => vec![Value::List(vec!["x".into()])],
            SettingKind::List { words, .. } => vec![Value::List(vec![words[0].into()])],
            SettingKind::Keys => vec![Value::Keys(vec!["x".into(), bobs_key()])],
        };
        for value in others {
            (setting.store)(&mut config, value.clone());
            assert_eq!((setting.load)(&config), value, "{}", setting.key);
        }
    }
    let mut sections: Vec<&str> = SETTINGS.iter().map(|setting| setting.section()).collect();
    sections.dedup();
    assert_eq!(sections, SECTIONS.iter().map(|(name, _)| *name).collect::<Vec<_>>());
}

#[test]
fn the_complete_file_is_the_defaults() {
    let resolved = from_file(&reference_file()).unwrap();
    assert_eq!(resolved.config, Config::default());
    for setting in SETTINGS {
        assert!(matches!(resolved.origin(setting.key), Origin::File { .. }), "{} is in the file", setting.key);
    }
}

#[test]
fn the_common_file_is_the_common_settings_at_their_defaults() {
    let resolved = from_file(&common_file()).unwrap();
    assert_eq!(resolved.config, Config::default());
    for setting in SETTINGS {
        let is_in = matches!(resolved.origin(setting.key), Origin::File { .. });
        assert_eq!(is_in, setting.is_common, "{}", setting.key);
    }
    assert!((10..=20).contains(&SETTINGS.iter().filter(|setting| setting.is_common).count()));
}

#[test]
fn every_description_is_made_of_sentences() {
    for setting in SETTINGS {
        for text in [setting.doc, setting.summary(), setting.when_to_change] {
            assert!(text.ends_with('.') && !text.contains("  ") && !text.contains('\n'), "{}: {text}", setting.key);
        }
        assert!(!setting.is_common || setting.summary().len() < 180, "{}: {}", setting.key, setting.summary());
    }
}

fn bobs_key() -> ApiKeyConfig {
    ApiKeyConfig {
        name: Some("bob".into()),
        requests_per_minute: Some(60),
        max_requests: Some(0),
        ..ApiKeyConfig::from("b")
    }
}

#[test]
fn an_api_key_is_a_text_or_a_table_with_a_name_and_limits() {
    let table = "{ key = \"b\", name = \"bob\", requests_per_minute = 60, max_requests = 0 }";
    let config = from_file(&format!("[server]\napi_keys = [\"a\", {table}]")).unwrap().config;
    assert_eq!(config.server.api_keys, [ApiKeyConfig::from("a"), bobs_key()]);
    // The same in TOML's other way, and as it is written out.
    let tables = "[[server.api_keys]]\nkey = \"b\"\nname = \"bob\"\nrequests_per_minute = 60\nmax_requests = 0\n";
    let resolved = from_file(tables).unwrap();
    assert_eq!(resolved.config.server.api_keys, [bobs_key()]);
    let shown = resolved.show();
    let line = shown.lines().find(|line| line.starts_with("api_keys")).unwrap();
    let hidden = table.replace("\"b\"", "\"(secret)\"");
    assert!(line.starts_with(&format!("api_keys = [{hidden}]")), "{line}");
    let value = Value::Keys(vec!["a".into(), bobs_key()]);
    assert_eq!(find("server.api_keys").unwrap().kind.read_json(&value.json()), Ok(value));
    for wrong in [
        "3",
        "{name = \"bob\"}",
        "{key = 3}",
        "{key = \"b\", nmae = \"bob\"}",
        "{key = \"b\", name = \"two words\"}",
        "{key = \"b\", max_requests = -1}",
        "{key = \"b\", max_requests = \"1\"}",
    ] {
        let problems = problems_of(from_file(&format!("[server]\napi_keys = [{wrong}]"))).concat();
        assert!(problems.contains("server.api_keys"), "{wrong}: {problems}");
        assert_eq!(problems.contains("nmae"), wrong.contains("nmae"), "{problems}");
        assert!(!problems.contains("\"b\""), "{problems}");
    }
}

#[test]
fn tls_needs_both_files_and_an_address_is_one() {
    for (text, key) in [
        ("[server]\ntls_cert = \"a.pem\"", "server.tls_cert: TLS also needs server.tls_key"),
        ("[server]\ntls_key = \"a.pem\"", "server.tls_key: TLS also needs server.tls_cert"),
        (
            "[server]\nunix_socket = \"a.sock\"\ntls_cert = \"a.pem\"\ntls_key = \"a.pem\"",
            "server.unix_socket: a Unix socket has no TLS",
        ),
        ("[server]\nroot_path = \"llm\"", "'llm' is not a path such as /llm"),
        ("[server]\nroot_path = \"/llm/\"", "'/llm/' is not a path such as /llm"),
        ("[server]\nroot_path = \"/a/../b\"", "'/a/../b' is not a path such as /llm"),
        ("[server]\nadmin_listen = \"9000\"", "'9000' is not an address with a port"),
        ("[tracing]\notlp_endpoint = \"localhost:4318\"", "is not an http:// or https:// URL"),
    ] {
        let problems = problems_of(from_file(text)).concat();
        assert!(problems.contains(key), "{problems}");
    }
    from_file("[server]\ntls_cert = \"a\"\ntls_key = \"b\"\nadmin_listen = \"[::1]:0\"").unwrap();
}

#[test]
fn one_of_several_keys_leaves_a_part_to_the_others() {
    let parts = |num_keys: usize, share, connections| {
        let mut config = Config::default();
        config.server.api_keys = (0..num_keys).map(|key| ApiKeyConfig::from(format!("k{key}").as_str())).collect();
        (config.server.max_requests, config.server.max_share_per_key) = (100, share);
        (config.limits.max_connections, config.limits.key_max_connections) = (30, connections);
        (config.server.max_requests_of_key(), config.key_max_connections())
    };
    assert_eq!([0, 1].map(|num_keys| parts(num_keys, None, None)), [(100, 0); 2]);
    assert_eq!(parts(2, None, None), (75, 23));
    assert_eq!(parts(2, Some(1.0), Some(0)), (100, 0));
    assert_eq!(parts(3, Some(0.001), Some(7)), (1, 7));
    assert_eq!(Config::default().key_max_connections(), 0, "there is no limit to have a part of");
}
