"""Starts a Prometheus that scrapes a server and evaluates the rules in dashboards/.

Prometheus and promtool come from the PATH, or from target/ci/prometheus, where .ci/run unpacks Debian's package.
"""

import contextlib
import json
import math
import pathlib
import shutil
import subprocess
import urllib.parse
import urllib.request

import yaml
from conftest import ROOT, free_port, wait_for

DASHBOARDS = ROOT / "dashboards"
CONFIG = DASHBOARDS / "prometheus/prometheus.yml"
SCRAPE_KEY = "prometheus-key"


def tool(name: str) -> str:
    unpacked = ROOT / "target/ci/prometheus/usr/bin" / name
    found = shutil.which(name) or (str(unpacked) if unpacked.exists() else None)
    assert found, f"there is no {name}: .ci/run unpacks Debian's package prometheus into target/ci/prometheus"
    return found


class Prometheus:
    def __init__(self, url: str):
        self.url = url

    def api(self, path: str, **parameters):
        query = urllib.parse.urlencode(parameters, doseq=True)
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=300) as answer:
            return json.load(answer)["data"]

    def query(self, expression: str, **parameters) -> list:
        return self.api("query", query=expression, **parameters)["result"]

    def value(self, expression: str) -> float:
        (series,) = self.query(expression)
        return float(series["value"][1])

    def has_data(self, expression: str, times: tuple) -> bool:
        """Whether any series has a finite value at any time of the range."""
        start, end = times
        found = self.api("query_range", query=expression, start=start, end=end, step=1)["result"]
        return any(math.isfinite(float(value)) for series in found for _, value in series["values"])


@contextlib.contextmanager
def scraping(server_url: str, folder: pathlib.Path):
    """Runs Prometheus with the configuration in dashboards/, except for its intervals, target and key."""
    config = yaml.safe_load(CONFIG.read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["rule_files"] = [str(CONFIG.parent / "rules/*.yml")]
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [server_url.removeprefix("http://")]}]
    job["authorization"] = {"credentials": SCRAPE_KEY}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [
        tool("prometheus"),
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with subprocess.Popen(command) as process:
        try:
            prometheus = Prometheus(f"http://127.0.0.1:{port}")
            wait_for(lambda: answers(prometheus.url))
            yield prometheus
        finally:
            process.terminate()
            process.wait(timeout=300)


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/-/ready", timeout=5).close()
        return True
    except OSError:
        return False
