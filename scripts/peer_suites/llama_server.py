#!/usr/bin/env python3
"""Takes llama-server's flags, and becomes pagetide with those that have a counterpart."""

import argparse
import os
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from peer_suites.program import command, demo_model  # noqa: E402

DEFAULT_CONTEXT = 4096


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", default="8080")
    parser.add_argument("--alias")
    parser.add_argument("--hf-repo")
    parser.add_argument("--ctx-size", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=1)
    parser.add_argument("--kv-unified", action="store_true")
    parser.add_argument("--api-key")
    parser.add_argument("--slot-save-path")
    parser.add_argument("--cors-origins")
    parser.add_argument("--chat-template-file")
    parser.add_argument("--reasoning-format")
    parser.add_argument("--jinja", action="store_true")
    flags, _ = parser.parse_known_args()

    context = flags.ctx_size or DEFAULT_CONTEXT
    # llama-server divides the context between its slots.
    if not flags.kv_unified:
        context //= flags.parallel
    template = None
    if flags.chat_template_file:
        template = pathlib.Path(flags.chat_template_file).read_text()
    options = {
        "server.host": flags.host.split(",")[0],
        "server.accept_any_model": True,
        "model.max_model_len": context,
        "scheduler.max_num_seqs": 256,
        "cache.num_device_blocks": 4096,
        "server.slot_save_path": flags.slot_save_path or "",
    }
    # Without a template of its own, the test's model does not reason.
    if flags.reasoning_format == "none" or template is None:
        options["model.reasoning_parser"] = "none"
    if flags.api_key:
        options["server.api_keys"] = [flags.api_key]
    if flags.cors_origins:
        options["server.cors_allowed_origins"] = flags.cors_origins.split(",")
    options = {key: value for key, value in options.items() if value != ""}
    name = flags.alias or flags.hf_repo or "demo"
    line = command(options, name.split(","), demo_model(max(context, 2048), template))
    line += ["--port", flags.port]
    print(*line, flush=True)
    os.execv(line[0], line)


if __name__ == "__main__":
    main()
