"""SGLang's kits as test classes. Each kit is a class of test methods that expects a running server in `base_url`.

pytest collects this file. Environment: PAGETIDE_BIN.
"""

import importlib
import inspect
import types
import unittest

import openai
import requests

from peer_suites import stubs
from peer_suites.program import command, demo_model, serve
from peer_suites.sources import source

ROOT = source("sglang")
CONTEXT = 32768
# SGLang's own helpers for tests; its other modules are stubs.
REAL_MODULES = ("sglang.test.",)
ABSENT = {"torch", "torchvision", "triton", "lm_eval", "sgl_kernel", "yaml", "tabulate"}


def is_real(name: str) -> bool:
    return name.startswith(REAL_MODULES)


stubs.install({"sglang"} | ABSENT, ROOT, is_real)

def get_tokenizer(*args, **kwargs):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(demo_model(CONTEXT)))


# The packages as they are after the stubs are in place.
import sglang.srt.utils.hf_transformers_utils  # noqa: E402

sglang.srt.utils.hf_transformers_utils.get_tokenizer = get_tokenizer
import sglang.test.kl_test_utils  # noqa: E402
from sglang.test.server_fixtures.spec_eagle_fixture import SpecEagleServerBase  # noqa: E402
from sglang.test.server_fixtures.streaming_session_fixture import ABORT_REPRO_CONTEXT_LEN  # noqa: E402

# What the classes of some kits set, as SGLang's own tests set it in theirs.
ATTRIBUTES = {
    # The answers have to be long enough to be paused.
    "PauseResumeInPlaceMixin": {"pause_ignore_eos": True, "pause_max_new_tokens": 700},
    "KLDivergenceMixin": {"kl_div_prefill_max_new_tokens": 64, "kl_div_decode_max_new_tokens": 64},
    # SGLang caches tokens one by one by default, so that a session finds all of its own again.
    "StreamingSessionKitMixin": {
        "context": 131072,
        "settings": {"cache.block_size": 1, "cache.num_device_blocks": 196608},
    },
    "AbortLeakReproKitMixin": {
        "context": ABORT_REPRO_CONTEXT_LEN,
        "settings": {"cache.block_size": 1, "cache.num_device_blocks": 65536},
    },
}

# A prompt of some hundred tokens.
LONG_TEXT = "The tide moves blocks between the device and the memory of the processor. " * 40


def stories(tokenizer, number: int) -> list[list[int]]:
    return [tokenizer.encode(f"Story {i}. " + LONG_TEXT) for i in range(number)]


# Theirs come from a data set that would be downloaded.
sglang.test.kl_test_utils.get_input_ids = lambda *_, **__: stories(get_tokenizer(), 8)


class Server(unittest.TestCase):
    """What the kits read of the class that they are mixed into."""

    served_model_name = "demo"
    api_key = "sk-123456"
    reasoning_parser_name = "qwen3"
    context = CONTEXT
    # Settings beside those of all kits.
    settings: dict = {}
    # How far the log-probabilities of two runs may be apart.
    kl_div_thres = 0.001
    cache_chunk_size = 64
    # Requests that their fixture of a server sends.
    run_decode = SpecEagleServerBase.run_decode
    send_request = SpecEagleServerBase.send_request
    send_requests_abort = SpecEagleServerBase.send_requests_abort

    @classmethod
    def flush_cache(cls):
        requests.post(f"{cls.base_url}/flush_cache", timeout=60).raise_for_status()

    @classmethod
    def setUpClass(cls):
        model = demo_model(cls.context)
        options = {
            "model.max_model_len": cls.context,
            "model.reasoning_parser": "qwen3" if "reasoning" in cls.__name__ else "none",
            "cache.num_device_blocks": 4096,
            "server.accept_any_model": True,
            "server.api_keys": [],
            "server.admin_key": "",
            **cls.settings,
        }
        program = serve(command({key: value for key, value in options.items() if value}, ["demo"], model))
        cls.process = program.process
        cls.base_url = f"http://127.0.0.1:{program.port}"
        cls.anthropic_base_url = cls.base_url
        cls.messages_url = f"{cls.base_url}/v1/messages"
        cls.model = "demo"
        cls.client = openai.OpenAI(base_url=f"{cls.base_url}/v1", api_key=cls.api_key, max_retries=0, timeout=60)
        cls.tokenizer = get_tokenizer()
        cls.input_ids = stories(cls.tokenizer, 16)
        cls.think_end_token_id = cls.tokenizer.convert_tokens_to_ids("</think>")


def kits():
    """The kits' classes that have tests of their own."""
    for file in sorted((ROOT / "sglang/test/kits").glob("*.py")):
        try:
            module = importlib.import_module(f"sglang.test.kits.{file.stem}")
        except Exception as error:
            yield file.stem, None, error
            continue
        for name, value in vars(module).items():
            own = inspect.isclass(value) and value.__module__ == module.__name__
            if own and any(member.startswith("test_") for member in dir(value)):
                yield file.stem, value, None


def _add_tests():
    for file, kit, error in kits():
        if kit is None:
            raise ImportError(f"the kit {file} cannot be imported") from error
        bases = (kit, Server) if not issubclass(kit, unittest.TestCase) else (kit,)
        # Helper methods of the kits that launch servers or evaluate are theirs.
        attributes = ATTRIBUTES.get(kit.__name__, {})
        case = types.new_class(f"{file}.{kit.__name__}", bases, exec_body=lambda body: body.update(attributes))
        case.__module__ = __name__
        globals()[f"{file}.{kit.__name__}"] = case


_add_tests()
del Server
