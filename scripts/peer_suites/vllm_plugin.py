"""A pytest plugin for vLLM's tests/entrypoints: without vLLM and torch, and with pagetide as the server.

PEER_SUITES_SOURCE is the folder of vLLM's source package.
"""

import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import uuid

import pytest

from peer_suites import stubs, tensors
from peer_suites.program import DEMO, binary, demo_model
from peer_suites.vllm_server import MAX_CONTEXT
from probes import free_port

ROOT = pathlib.Path(os.environ["PEER_SUITES_SOURCE"])
ABSENT = {
    "vllm", "torch", "torchaudio", "torchvision", "lm_eval", "mteb", "datasets", "soundfile", "librosa",
    "sentence_transformers", "model_hosting_container_standards", "tensorizer", "evaluate", "cv2", "av", "terratorch",
    "xgrammar", "mcp", "jiwer", "rapidfuzz",
}  # fmt: skip
# The models of answers and the encodings of embeddings, with which tests read answers.
REAL = re.compile(
    r"vllm\.entrypoints\.((pooling\.\w+|serve\.engine)\.protocol|pooling\.utils)|vllm\.utils\.serial_utils"
)


def is_real(name: str) -> bool:
    return REAL.fullmatch(name) is not None


@functools.cache
def tokenizer():
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(demo_model(MAX_CONTEXT)))


def get_tokenizer(*args, **kwargs):
    return tokenizer()


class ModelConfig:
    """Tests ask it for the size of the vocabulary."""

    def __init__(self, *args, **kwargs):
        pass

    def get_vocab_size(self) -> int:
        return json.loads((DEMO / "config.json").read_text())["vocab_size"]


def random_uuid() -> str:
    return uuid.uuid4().hex


def program_version() -> str:
    return subprocess.run([binary(), "--version"], check=True, capture_output=True, text=True).stdout.split()[-1]


def install():
    stubs.install(ABSENT, ROOT, is_real)
    import torch
    import torch.nn.functional
    import vllm.config
    import vllm.envs
    import vllm.model_executor.model_loader.weight_utils
    import vllm.tokenizers
    import vllm.utils
    import vllm.utils.network_utils
    import vllm.version

    tensors.add_to(torch, torch.nn.functional)
    vllm.config.ModelConfig = ModelConfig
    vllm.tokenizers.get_tokenizer = get_tokenizer
    vllm.utils.random_uuid = random_uuid
    vllm.utils.network_utils.get_open_port = free_port
    # Without a folder of its own: the server has the demo model, whatever the name.
    vllm.model_executor.model_loader.weight_utils.download_weights_from_hf = lambda name, **_: name
    # /version says the version of the program that answers.
    vllm.version.__version__ = program_version()
    vllm.version._prev_minor_version = lambda: "0.0"

    import transformers

    transformers.AutoTokenizer.from_pretrained = get_tokenizer

    # Their module of helpers starts vLLM and imports torch.
    from peer_suites import vllm_server

    sys.modules["tests.utils"] = vllm_server


def pytest_collection_modifyitems(items):
    for item in items:
        if item.name == "test_openapi_stateless":
            # One function makes requests to all paths.
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture
def local_asset_server():
    """Serves images in their tests/conftest.py, which imports torch. Tests of texts ask for it too."""
    return None


install()
