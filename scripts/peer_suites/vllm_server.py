"""Stands in for the module tests.utils of vLLM: its RemoteOpenAIServer starts pagetide."""

import os
import pathlib

import anthropic
import openai
import pytest

from peer_suites.program import command, demo_model, start
from probes import free_port

# Tokens of context, where a test does not say how many it needs, and at most.
CONTEXT = 4096
MAX_CONTEXT = 16384
VLLM_PATH = pathlib.Path(os.environ["PEER_SUITES_SOURCE"])
ROCM_EXTRA_ARGS: list[str] = []
ROCM_ENV_OVERRIDES: dict[str, str] = {}

# vLLM's flags that are settings here: (setting, value); None stands for the flag's own value.
FLAGS: dict[str, tuple[str, object]] = {
    "--api-key": ("server.api_keys", list),
    "--max-num-seqs": ("scheduler.max_num_seqs", int),
    "--max-num-batched-tokens": ("scheduler.max_num_batched_tokens", int),
    "--enable-prefix-caching": ("cache.enable_prefix_caching", True),
    "--no-enable-prefix-caching": ("cache.enable_prefix_caching", False),
    "--trust-request-chat-template": ("server.trust_request_chat_template", True),
    "--shutdown-timeout": ("server.drain_timeout_s", int),
    "--enable-force-include-usage": ("server.force_include_usage", True),
    "--return-tokens-as-token-ids": ("server.return_tokens_as_token_ids", True),
    # -1 is no limit there.
    "--max-logprobs": ("server.max_logprobs", lambda most: max(int(most), 0)),
    "--root-path": ("server.root_path", str),
    "--uds": ("server.unix_socket", str),
    "--enable-request-id-headers": ("server.request_id_headers", True),
    "--skip-tokenizer-init": ("model.skip_tokenizer_init", True),
    "--tokens-only": ("model.skip_tokenizer_init", True),
}
TOOL_PARSERS = {"hermes", "llama3_json", "mistral"}
REASONING_PARSERS = {"deepseek_r1", "qwen3", "mistral"}


def parse(arguments: list[str]) -> dict[str, list[str]]:
    """The flags and their values. The last of several equal flags counts."""
    flags: dict[str, list[str]] = {}
    current: list[str] = []
    for argument in arguments:
        if argument.startswith("-") and not argument.lstrip("-")[:1].isdigit():
            name, _, value = argument.partition("=")
            current = flags[name.replace("_", "-")] = []
            if value:
                current.append(value)
        else:
            current.append(argument)
    return flags


class RemoteVLLMServer:
    DUMMY_API_KEY = "token-abc123"
    DEFAULT_TOOL_PARSER = "hermes"

    def __init__(
        self,
        model,
        vllm_serve_args,
        *,
        env_dict=None,
        seed=0,
        auto_port=True,
        max_wait_seconds=None,
        override_hf_configs=None,
    ):
        flags = parse([str(argument) for argument in vllm_serve_args])
        environment = env_dict or {}
        context = min(int(flags.get("--max-model-len", [CONTEXT])[0]), MAX_CONTEXT)
        names = flags.get("--served-model-name") or [model]
        parser = flags.get("--reasoning-parser", ["none"])[0]
        options: dict[str, object] = {
            "model.max_model_len": context,
            "model.reasoning_parser": parser if parser in REASONING_PARSERS | {"none"} else "qwen3",
            "cache.num_device_blocks": 4096,
            "metrics.vllm_names": True,
            # vLLM has these APIs, and no limit to the size of a body.
            "server.surfaces": ["openai", "anthropic", "vllm", "cohere"],
            "server.dialect": "vllm",
            "server.request_id_headers": False,
            "console.enabled": False,
            "server.max_body_bytes": 128 << 20,
            "limits.max_body_values": 16 << 20,
            "limits.max_parsing_bytes": 256 << 20,
        }
        tool_parser = flags.get("--tool-call-parser", [self.DEFAULT_TOOL_PARSER])[0]
        options["model.tool_call_parser"] = tool_parser if tool_parser in TOOL_PARSERS | {"none"} else "hermes"
        if environment.get("VLLM_SERVER_DEV_MODE") == "1":
            options["server.debug_endpoints"] = True
            options["server.admin_key"] = ""
        if key := environment.get("VLLM_API_KEY"):
            options["server.api_keys"] = [key]
        for flag, (setting, value) in FLAGS.items():
            if flag in flags:
                given = flags[flag]
                kind = value if callable(value) else None
                options[setting] = value if kind is None else given if kind is list else kind(given[0])
        options = {key: value for key, value in options.items() if value != ""}
        template = None
        if path := flags.get("--chat-template"):
            file = pathlib.Path(path[0])
            template = file.read_text() if file.exists() else path[0]
        line = command(options, names, demo_model(MAX_CONTEXT, template))
        self.host = "127.0.0.1"
        self.uds = flags.get("--uds", [None])[0]
        self.show_hidden_metrics = False
        self.port = int(next((flags[name][0] for name in ("-p", "--port") if name in flags), free_port()))
        # A new program for each, since tests read metrics.
        self.program = start(line, self.port, unix_socket=self.uds)
        self.proc = self.program.process

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.program.stop()

    def _get_process_termination_timeout(self):
        return 20.0

    @property
    def url_root(self):
        return f"http://{self.uds.split('/')[-1]}" if self.uds else f"http://{self.host}:{self.port}"

    def url_for(self, *parts):
        return self.url_root + "/" + "/".join(part.strip("/") for part in parts if part)

    def _options(self, options):
        return {"api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": 60, **options}

    def get_client(self, **options):
        return openai.OpenAI(base_url=self.url_for("v1"), **self._options(options))

    def get_async_client(self, **options):
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), **self._options(options))

    def get_client_anthropic(self, **options):
        return anthropic.Anthropic(base_url=self.url_root, **self._options(options))

    def get_async_client_anthropic(self, **options):
        return anthropic.AsyncAnthropic(base_url=self.url_root, **self._options(options))


class RemoteOpenAIServer(RemoteVLLMServer):
    pass


class RemoteLaunchRenderServer(RemoteVLLMServer):
    # Its tests without flags take texts as they are.
    DEFAULT_TOOL_PARSER = "none"


class RemoteOpenAIServerCustom(RemoteVLLMServer):
    pass


def _unchanged(*args, **kwargs):
    """Their decorators run a test in a process of its own, which these tests do not need."""
    if len(args) == 1 and callable(args[0]) and not kwargs:
        return args[0]
    return lambda function: function


create_new_process_for_each_test = fork_new_process_for_each_test = spawn_new_process_for_each_test = _unchanged
large_gpu_test = single_gpu_only = _unchanged


def multi_gpu_test(*, num_gpus):
    return pytest.mark.skip(reason=f"needs {num_gpus} GPUs")


multi_gpu_only = multi_gpu_test


requires_fp8 = pytest.mark.skip(reason="needs a GPU")


def large_gpu_mark(min_gb):
    return pytest.mark.skip(reason=f"needs a GPU with {min_gb} GB")


def multi_gpu_marks(*, num_gpus):
    return [multi_gpu_test(num_gpus=num_gpus)]
