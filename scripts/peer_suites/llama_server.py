#!/usr/bin/env python3
"""Takes llama-server's flags, and becomes pagetide with those that have a counterpart."""

import argparse
import os
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from peer_suites.program import TEMPLATE, command, demo_model  # noqa: E402

DEFAULT_CONTEXT = 4096
# What llama.cpp's names of built-in templates stand for, as far as the tests use them.
HEADER = "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n{{ message.content }}<|eot_id|>"
TEMPLATES = {
    "chatml": TEMPLATE.read_text(),
    "llama3": "{% for message in messages %}" + HEADER + "{% endfor %}{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "command-r": "{% for message in messages %}<|START_OF_TURN_TOKEN|><|{{ message.role | upper }}_TOKEN|>"
    "{{ message.content }}<|END_OF_TURN_TOKEN|>{% endfor %}{% if add_generation_prompt %}"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}",
}


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", default="8080")
    parser.add_argument("--alias")
    parser.add_argument("--tags", default="")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--hf-repo")
    parser.add_argument("--ctx-size", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--kv-unified", action="store_true")
    parser.add_argument("--api-key")
    parser.add_argument("--slot-save-path")
    parser.add_argument("--cors-origins")
    parser.add_argument("--chat-template-file")
    parser.add_argument("--reasoning-format")
    parser.add_argument("--reasoning", default="auto")
    parser.add_argument("--chat-template")
    parser.add_argument("--batch-size", type=int, default=0)
    parser.add_argument("--metrics", action="store_true")
    parser.add_argument("--no-slots", action="store_true")
    parser.add_argument("--no-ui", action="store_true")
    parser.add_argument("--temp", type=float)
    parser.add_argument("--verbose", action="store_true")
    flags, _ = parser.parse_known_args()

    context = flags.ctx_size or DEFAULT_CONTEXT
    # llama-server divides the context between its slots.
    if not flags.kv_unified:
        context //= flags.parallel
    template = TEMPLATES.get(flags.chat_template, flags.chat_template)
    if flags.chat_template_file:
        template = pathlib.Path(flags.chat_template_file).read_text()
    options = {
        "server.host": flags.host.split(",")[0],
        "server.accept_any_model": True,
        "server.dialect": "llama.cpp",
        "server.model_tags": sorted(filter(None, flags.tags.split(","))),
        "server.verbose": flags.verbose,
        "server.slots": not flags.no_slots,
        "server.thinking": flags.reasoning,
        "server.default_seed": flags.seed if flags.seed is not None else "",
        # As llama-server does by default.
        "server.cors_allowed_origins": (flags.cors_origins or "*").split(","),
        "server.cors_allow_credentials": True,
        "model.max_model_len": context,
        "scheduler.max_num_seqs": flags.parallel,
        "scheduler.max_num_batched_tokens": max(flags.batch_size, flags.parallel) or "",
        "metrics.enabled": flags.metrics,
        "metrics.llama_cpp_names": flags.metrics,
        "console.enabled": not flags.no_ui,
        # llama.cpp's cache goes by tokens.
        "cache.block_size": 1,
        "cache.num_device_blocks": 16384,
        "server.slot_folder": flags.slot_save_path or "",
    }
    # Without a template of its own, the test's model does not reason.
    if flags.reasoning_format == "none" or not flags.chat_template_file:
        options["model.reasoning_parser"] = "none"
    if flags.api_key:
        options["server.api_keys"] = [flags.api_key]
    options = {key: value for key, value in options.items() if value != ""}
    name = flags.alias or flags.hf_repo or "demo"
    sampling = {"temperature": flags.temp, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    # llama-server's first name is the first in alphabetical order.
    line = command(options, sorted(name.split(",")), demo_model(max(context, 2048), template, sampling))
    line += ["--port", flags.port]
    print(*line, flush=True)
    os.execv(line[0], line)


if __name__ == "__main__":
    main()
