"""Writes grafana/pagetide.json, the dashboard as Grafana imports it, from the rows and panels below.

    python3 dashboards/generate.py

Every panel has a description for its reader: what it shows, and what to do if it looks wrong.
"""

import json
import pathlib

from panel_kinds import (
    PROMETHEUS,
    WIDTH,
    Figure,
    Heat,
    Lines,
    Table,
    increase,
    mean,
    now,
    quantile,
    quantiles,
    rate,
    series,
    share,
    total,
)

OUT = pathlib.Path(__file__).parent / "grafana/pagetide.json"

DEVICE_SLOTS = now("pagetide_device_blocks")
SWAP_SLOTS = now("pagetide_swap_blocks")
STATES = {"used": "blue", "cached": "yellow", "free": "green", "draining": "red"}
REQUEST_STATES = {"running": "green", "waiting": "yellow", "swapped": "blue"}

ROWS = [
    (
        "Overview",
        [
            Figure(
                "Servers up",
                "Chosen servers whose last scrape succeeded. If there are fewer than you run, a process is gone, "
                "does not answer, or needs another key (see the page Targets of Prometheus).",
                ("up", 'sum(up{job="pagetide",instance=~"$instance"})'),
                bad=None,
            ),
            Figure(
                "Alerts firing",
                "Alerts of dashboards/prometheus/rules/alerts.yml that fire now, on any server. Each says what to "
                "do; docs/monitoring.md says more.",
                ("alerts", 'count(ALERTS{alertname=~"Pagetide.*",alertstate="firing"}) or vector(0)'),
                warn=1,
                bad=3,
            ),
            Figure(
                "Requests per second",
                "Requests that ended. If this falls while requests wait, steps have become slow or memory is scarce: "
                "look at the memory tier and at step time.",
                ("requests", total("pagetide_requests_total")),
                unit="reqps",
            ),
            Figure(
                "Output tokens per second",
                "Tokens generated, of all requests together: the output of the server.",
                ("tokens", total("pagetide_generated_tokens_total")),
            ),
            Figure(
                "First token, p99",
                "99 % of the requests got their first token within this time. If it is high with a queue, capacity "
                "is short. If it is high without one, prompts are long, or scheduler.inter_token_target_ms holds "
                "them back.",
                ("p99", quantile(0.99, "pagetide_time_to_first_token_seconds")),
                unit="s",
                warn=1,
                bad=2.5,
            ),
            Figure(
                "Between tokens, p99",
                "99 % of the gaps between tokens are shorter than this. If it is high with preemptions, sequences "
                "are paused. If it is high without, steps are long: lower scheduler.inter_token_target_ms or "
                "scheduler.max_num_seqs.",
                ("p99", quantile(0.99, "pagetide_inter_token_seconds")),
                unit="s",
                warn=0.1,
                bad=0.2,
            ),
            Figure(
                "Device blocks in use",
                "The part of the device's KV blocks that sequences hold. A busy server should be near 100 %. This is "
                "a problem only together with preemptions or a queue.",
                ("used", share(now("pagetide_device_blocks", 'state="used"'), DEVICE_SLOTS)),
                unit="percentunit",
                warn=0.9,
            ),
            Figure(
                "Preemptions per minute",
                "Sequences that were preempted and come back later. A few are fine. If there are many, see the row "
                "on the memory tier.",
                ("preemptions", f"60 * {total('pagetide_preemptions_total')}"),
                warn=6,
                bad=60,
            ),
            Lines(
                "Requests held",
                "The states of the requests. If waiting grows, more requests come than are served. Swapped requests "
                "were preempted and wait in CPU memory to go on.",
                ("{{state}}", now("pagetide_requests", by="state")),
                stacked=True,
                colours=REQUEST_STATES,
            ),
            Lines(
                "How requests end",
                "Per second, by outcome. failed should be 0: the engine failed, and the log says why. cancelled: "
                "clients left, often because they had waited too long.",
                ("{{outcome}}", total("pagetide_requests_total", by="outcome")),
                unit="reqps",
                colours={"stop": "green", "length": "blue", "cancelled": "yellow", "failed": "red"},
            ),
            Lines(
                "Requests refused",
                "Per second, by reason. queue_full: the server already holds server.max_requests, and clients are "
                "told when to try again. invalid and too_long are the clients' mistakes. draining: the server is "
                "stopping.",
                ("{{reason}}", total("pagetide_rejected_total", by="reason")),
                unit="reqps",
                colours={"queue_full": "red", "too_long": "yellow", "invalid": "blue", "draining": "purple"},
            ),
            Lines(
                "Tokens per second",
                "Prompt tokens that were computed, prompt tokens from the prefix cache, and generated tokens.",
                (
                    "prompt, computed",
                    f"{total('pagetide_prompt_tokens_total')} - {total('pagetide_cached_tokens_total')}",
                ),
                ("prompt, cached", total("pagetide_cached_tokens_total")),
                ("generated", total("pagetide_generated_tokens_total")),
                width=12,
            ),
            Table(
                "What runs",
                "Version, model, device and type of each server, as reported at its start.",
                ("", series("pagetide_build_info")),
                width=12,
            ),
        ],
    ),
    (
        "Latency",
        [
            Lines(
                "Time to first token",
                "From arrival to the first token, including the queue. Compare it with the queue beside it: the rest "
                "is the time to compute the prompt.",
                *quantiles("pagetide_time_to_first_token_seconds"),
                unit="s",
            ),
            Lines(
                "Time in the queue",
                "From arrival to the first step. If it stays above zero, the server is full: add capacity, or a "
                "larger KV pool if all its blocks are used.",
                *quantiles("pagetide_queue_seconds"),
                unit="s",
            ),
            Lines(
                "Between two tokens",
                "The gaps that a reader of a stream notices. The p99 shows prompts of others in the same step, and "
                "pauses by preemption.",
                *quantiles("pagetide_inter_token_seconds"),
                unit="s",
            ),
            Lines(
                "Whole requests",
                "From arrival to the end. It depends on the lengths of requests: watch its changes, not its value.",
                *quantiles("pagetide_e2e_seconds"),
                unit="s",
            ),
            Heat(
                "First tokens, all of them",
                "Every request's time to first token. Two bands are two kinds of requests (cached or not, short or "
                "long), which no percentile shows.",
                ("{{le}}", f"sum by (le) ({increase('pagetide_time_to_first_token_seconds_bucket')})"),
                unit="s",
            ),
            Lines(
                "Error budget burnt",
                "How fast the budget of each latency objective is used up: at 1 it lasts for exactly its 30 days, at "
                "14.4 for two. The alerts PagetideLatencyBurn* go by this. The objectives are in "
                "rules/recording.yml.",
                ("{{objective}}, 5 min", f"max by (objective) ({series('pagetide:slo_errors:burn5m')})"),
                ("{{objective}}, 1 h", f"max by (objective) ({series('pagetide:slo_errors:burn1h')})"),
            ),
        ],
    ),
    (
        "Memory tier",
        [
            Lines(
                "Device blocks",
                "used: held by sequences. cached: kept for prompts that begin the same, and evicted when needed. If "
                "no blocks are free or cached, the next sequence that grows preempts another.",
                ("{{state}}", now("pagetide_device_blocks", by="state")),
                stacked=True,
                colours=STATES,
            ),
            Lines(
                "Swap pool",
                "Blocks in CPU memory. used: of preempted sequences, or copied ahead for likely victims. cached: "
                "prefixes that the device evicted. If all are used, further victims are recomputed: raise "
                "swap.space_gib, which takes effect at once on SIGHUP. draining: held beyond a size that was "
                "lowered.",
                ("{{state}}", now("pagetide_swap_blocks", by="state")),
                stacked=True,
                colours=STATES,
            ),
            Lines(
                "Preemptions",
                "Preempted sequences per second, swapped out or to be recomputed. If there are many for long, the "
                "pool is too small for the sequences: lower scheduler.max_num_seqs, or add blocks.",
                ("{{mode}}", total("pagetide_preemptions_total", by="mode")),
                colours={"swap": "blue", "recompute": "red"},
            ),
            Lines(
                "Swap traffic",
                "Bytes per second: to the device upwards, to the swap pool downwards. Traffic out without "
                "preemptions is write-behind and the second level of the cache.",
                ("in", total("pagetide_swap_in_bytes_total")),
                ("out", total("pagetide_swap_out_bytes_total")),
                unit="Bps",
                below=("out",),
                colours={"in": "green", "out": "blue"},
            ),
            Lines(
                "Arbiter's decisions",
                "What scheduler.preemption_mode = auto chose, per second: all blocks to the swap pool, the full "
                "ones, or none. It follows the copy times beside it. With another mode this is empty.",
                ("{{choice}}", total("pagetide_arbiter_decisions_total", by="choice")),
            ),
            Lines(
                "Time to copy a block",
                "As the arbiter has measured it. A jump means that something else uses the memory bus, or that the "
                "host swaps.",
                ("{{direction}}", f"max by (direction) ({series('pagetide_copy_seconds')})"),
                unit="s",
            ),
            Lines(
                "Blocks to be copied",
                "The queue of copies. It should fall to zero between bursts; if it only grows, copies are too slow. "
                "Beside it is what a preemption left to be copied. If that is more than a block above its bound, "
                "copies ahead do not keep up: lower swap.high_watermark.",
                ("waiting", now("pagetide_copy_queue_blocks")),
                ("by a preemption, p99", quantile(0.99, "pagetide_preemption_blocks")),
                ("its bound", f"max({series('pagetide_max_tail_blocks')})"),
            ),
            Lines(
                "Tokens computed twice",
                "Of all tokens that steps computed, the part that was computed again after a preemption. Above a "
                "tenth for long, memory pressure costs more than it brings. The alert PagetideRecomputing fires at a "
                "fifth.",
                (
                    "recomputed",
                    share(total("pagetide_recomputed_tokens_total"), total("pagetide_step_tokens_sum")),
                ),
                unit="percentunit",
            ),
            Lines(
                "KV waste",
                "Slots of used blocks that hold no token. Half a block for each sequence is normal. Short sequences "
                "waste much more: use a smaller cache.block_size.",
                (
                    "empty slots",
                    share(total("pagetide_kv_empty_slot_steps_total"), total("pagetide_kv_slot_steps_total")),
                ),
                unit="percentunit",
            ),
        ],
    ),
    (
        "Prefix cache",
        [
            Lines(
                "Prompt tokens found",
                "The part of the prompt tokens that did not have to be computed, by the tier that had them. If it "
                "falls after a change of clients, their prompts no longer begin the same (a date or an id at the "
                "front is enough).",
                (
                    "{{tier}}",
                    f"{total('pagetide_prefix_cache_hits_total', by='tier')} / ignoring (tier) group_left "
                    f"{total('pagetide_prefix_cache_queries_total')}",
                ),
                unit="percentunit",
                stacked=True,
                width=12,
            ),
            Lines(
                "Tokens looked up and found",
                "Per second. If little is found although prompts repeat, the cache is too small (see its blocks), or "
                "requests come with different keys or salts, which share nothing.",
                ("looked up", total("pagetide_prefix_cache_queries_total")),
                ("found on the {{tier}}", total("pagetide_prefix_cache_hits_total", by="tier")),
                width=12,
            ),
            Lines(
                "Cached blocks",
                "Blocks that no sequence holds and that are kept for later prompts, on either tier. Near zero on the "
                "device under load is normal. Near zero on both tiers, the cache helps only running requests.",
                ("device", now("pagetide_device_blocks", 'state="cached"')),
                ("swap pool", now("pagetide_swap_blocks", 'state="cached"')),
                width=12,
            ),
            Lines(
                "Size of the pools",
                "All blocks of each tier. The size of the swap pool changes with swap.space_gib while the server "
                "runs.",
                ("device", DEVICE_SLOTS),
                ("swap pool", SWAP_SLOTS),
                width=12,
            ),
        ],
    ),
    (
        "Scheduler and step time",
        [
            Lines(
                "Where a step's time goes",
                "Mean seconds of a step: planning, the forward pass with its copies, sampling. Planning should be "
                "invisible here.",
                ("{{phase}}", mean("pagetide_step_seconds", by="phase")),
                unit="s",
                stacked=True,
            ),
            Lines(
                "Time between steps",
                "How long the device waited for the host between two steps. On a GPU with scheduler.overlap it "
                "should be near zero. If it is not, the host is short of processors.",
                ("p50", quantile(0.5, "pagetide_step_gap_seconds")),
                ("p99", quantile(0.99, "pagetide_step_gap_seconds")),
                unit="s",
            ),
            Lines(
                "How busy the device is",
                "The part of the time that the device computes. If it is well below 1 while requests wait and no "
                "tenant is over its quota, that is a bug worth reporting.",
                (
                    "{{instance}}",
                    total("pagetide_step_seconds_sum", 'phase=~"execute|sample"', by="instance"),
                ),
                unit="percentunit",
            ),
            Lines(
                "Sequences in a step",
                "The batch. If it is at scheduler.max_num_seqs and requests wait, raise that setting, if the gaps "
                "between tokens allow it.",
                ("p50", quantile(0.5, "pagetide_batch_sequences")),
                ("p99", quantile(0.99, "pagetide_batch_sequences")),
            ),
            Lines(
                "Tokens in a step",
                "Tokens of prompts and decodes together, at most scheduler.max_num_batched_tokens.",
                ("mean", mean("pagetide_step_tokens")),
                ("p99", quantile(0.99, "pagetide_step_tokens")),
            ),
            Lines(
                "Room for prompts in a step",
                "Prompt tokens that the latest step could have had in addition to its decodes. If it is small for "
                "long, prompts are slow and first tokens are late: raise scheduler.inter_token_target_ms.",
                ("{{instance}}", series("pagetide_prompt_limit_tokens")),
            ),
            Lines(
                "What admission counts with",
                "Tokens that an output is expected to get, and the number of steps for which blocks had to suffice "
                "for the last sequence considered (the horizon). A high horizon means that preemptions are expensive "
                "here, so fewer sequences are admitted.",
                ("expected output, {{instance}}", series("pagetide_expected_output_tokens")),
                ("horizon, {{instance}}", series("pagetide_admission_horizon_tokens")),
            ),
            Lines(
                "What the scheduler expects",
                "Seconds that the decodes of the latest step take by themselves. The scheduler uses this to keep "
                "scheduler.inter_token_target_ms.",
                ("decodes, {{instance}}", series("pagetide_expected_seconds", 'of="decodes"')),
                ("a prompt token, {{instance}}", series("pagetide_expected_seconds", 'of="prompt_token"')),
                unit="s",
            ),
            Lines(
                "Restarts and changes",
                "Each step up is one event. Executor restarts: the device failed, and with it the running requests; "
                "the log says why. Changes refused: a new configuration is not in force.",
                ("executor restarts", f"sum({increase('pagetide_executor_restarts_total')})"),
                ("settings {{result}}", f"sum by (result) ({increase('pagetide_config_changes_total')})"),
            ),
        ],
    ),
    (
        "Per tenant",
        [
            Lines(
                "Requests held, by key",
                "A tenant is an API key, called by its name or a fingerprint. One with many waiting and few running "
                "requests has met its quota, or sends more than its share.",
                ("{{tenant}} {{state}}", now("pagetide_tenant_requests", by="tenant, state")),
            ),
            Lines(
                "Tokens per second, by key",
                "Which keys use the server. Generated tokens cost a step each; prompt tokens are computed many at a "
                "time, or found in the cache.",
                ("{{tenant}} {{kind}}", total("pagetide_tenant_tokens_total", by="tenant, kind")),
            ),
            Lines(
                "Requests ended, by key",
                "Per second. If many of one key are cancelled, its clients' time-outs are shorter than its answers.",
                ("{{tenant}} {{outcome}}", total("pagetide_tenant_requests_total", by="tenant, outcome")),
                unit="reqps",
            ),
            Lines(
                "Blocks held, by key",
                "On the device and in the swap pool. A block that several sequences share counts for each. If one "
                "key has nearly all, set cache.max_share_per_key.",
                ("{{tenant}} {{tier}}", now("pagetide_tenant_blocks", by="tenant, tier")),
                stacked=True,
            ),
            Lines(
                "Quotas met, by key",
                "How often per second a quota refused something: a request had to wait for others of its key "
                "(device), or a sequence had to be recomputed instead of swapped (swap).",
                ("{{tenant}} {{tier}}", total("pagetide_tenant_quota_total", by="tenant, tier")),
            ),
            Lines(
                "Requests refused, by key",
                "Per second, by reason. If one key has many invalid requests, tell its owner.",
                ("{{tenant}} {{reason}}", total("pagetide_tenant_rejected_total", by="tenant, reason")),
                unit="reqps",
            ),
        ],
    ),
    (
        "HTTP",
        [
            Lines(
                "Answers by status",
                "Per second. 429: refused for lack of room. 5xx: look at the log; requests have an id there and in "
                "the header x-request-id. A stream that fails later still has 200.",
                ("{{status}}", total("pagetide_http_requests_total", by="status")),
                unit="reqps",
                width=12,
            ),
            Lines(
                "Answers by path",
                "Per second. Paths that do not exist are counted as other.",
                ("{{path}}", total("pagetide_http_requests_total", by="path")),
                unit="reqps",
                width=12,
            ),
        ],
    ),
]


def panels() -> list:
    """Rows and panels with their places, from left to right and from top to bottom."""
    models, y = [], 0
    for title, row in ROWS:
        models.append(
            {
                "id": len(models) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
                "panels": [],
            }
        )
        x, y, line_height = 0, y + 1, 0
        for panel in row:
            if x + panel.width > WIDTH:
                x, y, line_height = 0, y + line_height, 0
            place = {"x": x, "y": y, "w": panel.width, "h": panel.height}
            models.append(panel.model(place, len(models) + 1))
            x, line_height = x + panel.width, max(line_height, panel.height)
        y += line_height
    return models


def variable(name: str, label: str, query: str) -> dict:
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": PROMETHEUS,
        "query": {"query": query, "refId": "variable"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def dashboard() -> dict:
    return {
        "uid": "pagetide",
        "title": "Pagetide",
        "description": "An LLM server: what it does, how fast, and what its KV memory goes through.",
        "tags": ["pagetide", "llm"],
        "schemaVersion": 41,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [
                {
                    "type": "datasource",
                    "name": "datasource",
                    "label": "Data source",
                    "query": "prometheus",
                    "refresh": 1,
                },
                variable("model", "Model", "label_values(pagetide_build_info, model)"),
                variable("instance", "Server", 'label_values(pagetide_build_info{model=~"$model"}, instance)'),
            ]
        },
        "annotations": {
            "list": [
                {
                    "name": "Alerts",
                    "datasource": PROMETHEUS,
                    "enable": True,
                    "iconColor": "red",
                    "target": {
                        "refId": "alerts",
                        "expr": 'ALERTS{alertname=~"Pagetide.*",alertstate="firing"}',
                        "legendFormat": "{{alertname}} {{instance}}",
                    },
                }
            ]
        },
        "panels": panels(),
    }


def text() -> str:
    return json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    OUT.write_text(text())
