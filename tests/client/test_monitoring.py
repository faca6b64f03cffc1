"""A real Prometheus scrapes a server under memory pressure, and every query in dashboards/ must return data."""

import asyncio
import itertools
import json
import math
import pathlib
import re
import subprocess
import sys
import time
import urllib.parse
import urllib.request

import openai
import pytest
import yaml
from conftest import ROOT, serving, wait_for
from prometheus import CONFIG, DASHBOARDS, SCRAPE_KEY, scraping, tool

DASHBOARD = DASHBOARDS / "grafana/pagetide.json"
NODE = ROOT / "tests/client/node"

KEYS = {"first": "sk-one", "second": "sk-two", "impatient": "sk-three"}
ADMIN_KEY = "sk-admin"
# Up to 14 requests of up to 200 tokens run at the same time, and the pool holds three or four of them. Tenants reach
# their quotas, and some victims find the swap pool full. Victims are swapped at first, however slow the machine's first
# copies are. Then the mode is `auto`, whose decisions are counted.
PRESSURE = (
    *("--num-device-blocks", "40", "--block-size", "16", "--swap-space-gib", "0.0005"),
    *("--set", "scheduler.inter_token_target_ms=0", "--set", "scheduler.admission=prompt"),
    *("--set", "cache.max_share_per_key=0.6", "--set", "metrics.vllm_names=true"),
    *("--preemption-mode", "swap", "--set", f"server.admin_key={ADMIN_KEY}"),
    *itertools.chain.from_iterable(("--api-key", key) for key in KEYS.values()),
    *("--set", f"server.metrics_key={SCRAPE_KEY}"),
)
LOAD_S = 12
AT_ONCE = 7


def promtool(*command) -> None:
    result = subprocess.run([tool("promtool"), *map(str, command)], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr


async def load(server) -> dict:
    """Puts load on the server. Returns each key's prompt tokens and generated tokens, as its answers count them."""
    clients = {
        name: openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=300)
        for name, key in KEYS.items()
    }
    model = (await clients["first"].models.list()).data[0].id
    end = time.monotonic() + LOAD_S
    used = {"first": [0, 0], "second": [0, 0]}

    def request(number: int, prompt: list) -> dict:
        length = 40 + 7 * (number % 20)
        options = {"ignore_eos": True}
        return dict(model=model, prompt=prompt, max_tokens=length, temperature=0, extra_body=options)

    async def ask(name: str, first: int, count: int):
        # All prompts begin with the same 32 tokens, so that a part of every prompt but the first is cached.
        for number in itertools.count(first, count):
            prompt = [7] * 32 + [20 + number % 400] * (8 + number % 40)
            answer = await clients[name].completions.create(**request(number, prompt))
            used[name][0] += answer.usage.prompt_tokens
            used[name][1] += answer.usage.completion_tokens
            if time.monotonic() > end:
                return

    async def others():
        impatient = clients["impatient"].completions
        await asyncio.sleep(2)
        # The client leaves after the first of many tokens.
        async with await impatient.create(**request(19, [9] * 32) | {"max_tokens": 400}, stream=True) as stream:
            await anext(aiter(stream))
        with pytest.raises(openai.BadRequestError):
            await impatient.create(**request(0, [9]) | {"temperature": -1})
        await asyncio.sleep(LOAD_S / 2)
        await asyncio.to_thread(server.post, "/admin/config", {"scheduler.preemption_mode": "auto"}, ADMIN_KEY)

    # The first key sends more, so that the two can be told apart.
    askers = [ask("first", index, AT_ONCE) for index in range(AT_ONCE)]
    askers += [ask("second", 1000 + index, AT_ONCE - 2) for index in range(AT_ONCE - 2)]
    await asyncio.gather(*askers, others())
    return used


class Scraped:
    def __init__(self, prometheus, times, used, page):
        self.prometheus, self.times, self.used, self.page = prometheus, times, used, page


@pytest.fixture(scope="module")
def scraped(tmp_path_factory):
    """A Prometheus that has scraped a server under pressure."""
    folder = tmp_path_factory.mktemp("prometheus")
    with serving(*PRESSURE) as server, scraping(server.url, folder) as prometheus:
        wait_for(lambda: prometheus.query("pagetide_build_info"))
        start = time.time()
        used = asyncio.run(load(server))
        end = time.time()
        ended = 'sum(pagetide_requests) == 0 and sum(rate(pagetide_generated_tokens_total[3s])) == 0'
        wait_for(lambda: prometheus.query(ended))
        request = urllib.request.Request(f"{server.url}/metrics", headers={"Authorization": f"Bearer {SCRAPE_KEY}"})
        with urllib.request.urlopen(request, timeout=300) as answer:
            page = answer.read().decode()
        yield Scraped(prometheus, (start, end), used, page)


def panels() -> list:
    return [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]


def filled_in(expression: str) -> str:
    """The query that Grafana would send with all servers chosen."""
    for variable, value in {"__rate_interval": "5s", "instance": ".+", "model": ".+"}.items():
        expression = expression.replace(f"${variable}", value)
    assert "$" not in expression, expression
    return expression


def rules(file: str) -> list:
    groups = yaml.safe_load((DASHBOARDS / "prometheus/rules" / file).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def without_thresholds(expression: str) -> str:
    """Makes every comparison return 0 or 1 (with PromQL's modifier `bool`) instead of dropping series.

    The expression then has a value exactly where all its parts have values with matching labels.
    """
    # Label matchers stay as they are. `or` and `unless` would hide a part without a value.
    outside = re.split(r'(\{[^}]*\}|"[^"]*")', expression)
    assert not re.search(r"\b(or|unless)\b", "".join(outside[::2])), expression
    outside[::2] = [re.sub(r"(==|!=|>=|<=|>|<)", r"\1 bool", part) for part in outside[::2]]
    return "".join(outside)


def test_every_panel_has_data(scraped):
    empty = [
        f"{panel['title']}: {target['expr']}"
        for panel in panels()
        for target in panel["targets"]
        if not scraped.prometheus.has_data(filled_in(target["expr"]), scraped.times)
    ]
    assert not empty, "\n".join(empty)


def test_every_variable_and_annotation_has_values(scraped):
    dashboard = json.loads(DASHBOARD.read_text())
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()
            assert scraped.prometheus.api(f"label/{label}/values", **{"match[]": filled_in(metric)})
    for annotation in dashboard["annotations"]["list"]:
        # No alert fires here, so this only checks that the query is valid.
        scraped.prometheus.query(annotation["target"]["expr"])


def test_every_rule_has_data(scraped):
    prometheus, (_, end) = scraped.prometheus, scraped.times
    known = [rule for group in prometheus.api("rules")["groups"] for rule in group["rules"]]
    assert len(known) == len(rules("recording.yml")) + len(rules("alerts.yml"))
    assert all(rule["health"] == "ok" for rule in known), [rule.get("lastError") for rule in known]
    for rule in rules("recording.yml"):
        labels = ",".join(f'{name}="{value}"' for name, value in rule.get("labels", {}).items())
        assert prometheus.has_data(f"{rule['record']}{{{labels}}}", scraped.times), rule["record"]
    for rule in rules("alerts.yml"):
        expression = without_thresholds(rule["expr"])
        assert expression != rule["expr"] and prometheus.query(expression, time=end), rule["alert"]


def test_what_happened_is_what_is_told(scraped):
    value = scraped.prometheus.value
    # All of this has happened, so no panel can pass by showing nothing.
    for happened in [
        "sum(pagetide_preemptions_total)",
        'pagetide_preemptions_total{mode="recompute"}',
        "pagetide_recomputed_tokens_total",
        "pagetide_cached_tokens_total",
        'pagetide_preemptions_total{mode="swap"}',
        "pagetide_swap_out_bytes_total",
        "pagetide_swap_in_bytes_total",
        "sum(pagetide_arbiter_decisions_total)",
        "sum(pagetide_prefix_cache_hits_total)",
        'sum(pagetide_tenant_quota_total{tier="device"})',
        'max_over_time(pagetide_requests{state="waiting"}[1m])',
        'max_over_time(pagetide_requests{state="swapped"}[1m])',
        'max(max_over_time(pagetide_tenant_blocks{tier="swap"}[1m]))',
    ]:
        assert value(happened) > 0, happened
    assert value('pagetide_requests_total{outcome="cancelled"}') == 1
    assert value('pagetide_rejected_total{reason="invalid"}') == 1
    assert value("sum(pagetide_device_blocks)") == 40
    assert value("pagetide_copy_queue_blocks") == 0, "copies have ended, and the metric says so"
    assert value("sum(pagetide_tenant_blocks)") == 0, "no tenant holds blocks when nothing runs"


def test_tenants_are_told_apart_and_their_keys_are_not_told(scraped):
    tokens = {}
    for series in scraped.prometheus.query("pagetide_tenant_tokens_total"):
        labels = series["metric"]
        tokens.setdefault(labels["tenant"], {})[labels["kind"]] = int(series["value"][1])
    assert len(tokens) == len(KEYS) and all(re.fullmatch("key-[0-9a-f]{8}", tenant) for tenant in tokens)
    counted = [[tenant["prompt"], tenant["generated"]] for tenant in tokens.values()]
    # Metrics agree exactly with the answers, however often sequences were paused or computed again.
    assert scraped.used["first"] in counted and scraped.used["second"] in counted
    assert not any(key in scraped.page for key in [*KEYS.values(), SCRAPE_KEY])
    outcomes = [f"sum by (outcome) (pagetide_{of}requests_total)" for of in ("tenant_", "")]
    assert len(scraped.prometheus.query(" == ".join(outcomes))) == 4, "every request had a key"


# The queries of vLLM's Grafana dashboard (examples/observability/prometheus_grafana in its repository), rebuilt from
# the names, labels and functions that they use.
QUANTILES_OF_VLLM = ["e2e_request_latency_seconds", "inter_token_latency_seconds", "time_to_first_token_seconds"]
RATES_OF_VLLM = [
    *("prompt_tokens_total", "generation_tokens_total", "request_queue_time_seconds_sum"),
    *("request_prefill_time_seconds_sum", "request_decode_time_seconds_sum"),
    "request_max_num_generation_tokens_sum",
]
OTHERS_OF_VLLM = [
    "vllm:num_requests_running{model}",
    "vllm:num_requests_waiting{model}",
    "vllm:kv_cache_usage_perc{model}",
    "sum by(le) (increase(vllm:request_prompt_tokens_bucket{model}[$__rate_interval]))",
    "sum by(le) (increase(vllm:request_generation_tokens_bucket{model}[$__rate_interval]))",
    "sum by(finished_reason) (increase(vllm:request_success_total{model}[$__rate_interval]))",
    # From older versions of the dashboard.
    "vllm:gpu_cache_usage_perc{model}",
    "histogram_quantile(0.99, sum by(le) (rate(vllm:time_per_output_token_seconds_bucket{model}[$__rate_interval])))",
    # Read by the Gateway API inference extension, according to its model server protocol.
    'vllm:cache_config_info{block_size="16",num_gpu_blocks="40"}',
]


def test_vllms_dashboard_has_data(scraped):
    assert "demo" in scraped.prometheus.api("label/model_name/values"), "the dashboard's variable model_name"
    queries = [
        f"histogram_quantile({quantile}, sum by(le) (rate(vllm:{name}_bucket{{model}}[$__rate_interval])))"
        for name in QUANTILES_OF_VLLM
        for quantile in (0.99, 0.95, 0.9, 0.5)
    ]
    queries += [
        f"rate(vllm:{name}_sum{{model}}[$__rate_interval]) / rate(vllm:{name}_count{{model}}[$__rate_interval])"
        for name in QUANTILES_OF_VLLM
    ]
    queries += [f"rate(vllm:{name}{{model}}[$__rate_interval])" for name in RATES_OF_VLLM]
    for query in queries + OTHERS_OF_VLLM:
        query = query.replace("{model}", '{model_name="demo"}').replace("$__rate_interval", "5s")
        assert scraped.prometheus.has_data(query, scraped.times), query


def test_vllms_names_say_the_same_as_ours(scraped):
    """Compares the values at the end, when nothing runs."""
    value = scraped.prometheus.value
    for theirs, ours in [
        ("vllm:prompt_tokens_total", "pagetide_prompt_tokens_total"),
        ("sum(vllm:prompt_tokens_by_source_total)", "pagetide_prompt_tokens_total"),
        ("vllm:prompt_tokens_cached_total", "pagetide_cached_tokens_total"),
        ("vllm:generation_tokens_total", "pagetide_generated_tokens_total"),
        ("vllm:num_preemptions_total", "sum(pagetide_preemptions_total)"),
        ("vllm:prefix_cache_queries_total", "pagetide_prefix_cache_queries_total"),
        ("vllm:prefix_cache_hits_total", 'pagetide_prefix_cache_hits_total{tier="device"}'),
        ("vllm:external_prefix_cache_hits_total", 'pagetide_prefix_cache_hits_total{tier="cpu"}'),
        ('vllm:request_success_total{finished_reason="length"}', 'pagetide_requests_total{outcome="length"}'),
        ('vllm:request_success_total{finished_reason="abort"}', 'pagetide_requests_total{outcome="cancelled"}'),
        ("vllm:time_to_first_token_seconds_count", "pagetide_time_to_first_token_seconds_count"),
        ("vllm:inter_token_latency_seconds_sum", "pagetide_inter_token_seconds_sum"),
        ("vllm:request_prompt_tokens_count", 'pagetide_requests_total{outcome="length"}'),
        # Answers have as many tokens as requested. The cancelled request is counted in neither metric.
        ("vllm:request_generation_tokens_sum", "vllm:request_params_max_tokens_sum"),
        ("vllm:num_requests_waiting", "0 * vllm:num_requests_running"),
    ]:
        assert value(theirs) == pytest.approx(value(ours), rel=1e-9), theirs
    # vLLM counts the first token of an answer in the step that computes its prompt's last token.
    steps = value("pagetide_step_tokens_sum")
    assert steps < value("vllm:iteration_tokens_total_sum") <= steps + value("pagetide_generated_tokens_total")
    # A request's time is its time in the queue, in prefill and in decode, plus a little outside the engine.
    parts = [f"vllm:request_{part}_time_seconds_sum" for part in ("queue", "prefill", "decode")]
    assert sum(map(value, parts)) == pytest.approx(value("vllm:e2e_request_latency_seconds_sum"), rel=0.02)


def test_rules_and_configuration_are_right():
    promtool("check", "config", CONFIG)
    promtool("check", "rules", *sorted((CONFIG.parent / "rules").iterdir()))
    files = sorted((CONFIG.parent / "tests").iterdir())
    promtool("test", "rules", *files)
    groups = [group for file in files for group in yaml.safe_load(file.read_text())["tests"]]
    tried = [test for group in groups for test in group["alert_rule_test"]]
    for rule in rules("alerts.yml"):
        assert {"summary", "description", "action"} <= rule["annotations"].keys() and "severity" in rule["labels"]
        outcomes = {bool(test["exp_alerts"]) for test in tried if test["alertname"] == rule["alert"]}
        assert outcomes == {True, False}, f"{rule['alert']} is not tested both to fire and not to fire"


def test_the_dashboard_is_what_the_generator_writes_and_grafana_reads():
    generated = subprocess.run(
        [sys.executable, "-c", "import generate; print(generate.text(), end='')"],
        cwd=DASHBOARDS,
        capture_output=True,
        text=True,
        check=True,
    )
    assert DASHBOARD.read_text() == generated.stdout, "run python3 dashboards/generate.py"
    assert all(len(panel["description"]) > 40 for panel in panels())
    checked = subprocess.run(["node", NODE / "dashboard.mjs", DASHBOARD], capture_output=True, text=True, timeout=300)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_compose_mounts_what_there_is():
    compose = yaml.safe_load((DASHBOARDS / "compose.yml").read_text())
    services = compose["services"]
    mounts = {}
    for service in services.values():
        for mount in service.get("volumes", []):
            source, target, *_ = mount.split(":")
            if source.startswith("."):
                assert (DASHBOARDS / source).exists(), source
                mounts[target] = DASHBOARDS / source
    provisioning = mounts["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())["datasources"]
    assert urllib.parse.urlparse(source["url"]).hostname in services
    (provider,) = yaml.safe_load((provisioning / "dashboards/pagetide.yml").read_text())["providers"]
    assert any(pathlib.PurePosixPath(target).is_relative_to(provider["options"]["path"]) for target in mounts)
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert mounts[home].samefile(DASHBOARD)
    (scrape,) = yaml.safe_load(CONFIG.read_text())["scrape_configs"]
    target = scrape["static_configs"][0]["targets"][0]
    assert target.split(":")[0] in services and scrape["job_name"] == "pagetide"
