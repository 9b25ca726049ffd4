"""A real Prometheus with the configuration of docker-compose.yml: dashboards and alerts use metrics that exist."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import yaml

from benchmarks.harness import monitoring
from benchmarks.harness.compose import ROOT, compose_document
from benchmarks.harness.monitoring import Prometheus
from benchmarks.harness.topology import program, topology
from benchmarks.kafka.brokers import mock_brokers
from storage.errors import FAILURE_CAUSES
from tests.app.jobs.kafka.topics import ConsumerProcess, PublisherProcess, produce
from tests.waiting import PATIENCE_S, wait_until

PROMETHEUS = ROOT / "docker" / "prometheus"
GRAFANA = ROOT / "docker" / "grafana"
CONFIG = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
ALERTS = Path(__file__).with_name("alerts.yml")
RULES = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((GRAFANA / "dashboards" / "lisarec.json").read_text())
COMPOSE = compose_document()

PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [target["expr"] for panel in PANELS for target in panel["targets"]]
DRAWN = [expression.replace("$__rate_interval", "1m").replace("$namespace", ".*") for expression in EXPRESSIONS]
PROMETHEUS_OWN = {"up", "ALERTS"}
OPERATORS = {"or", "and", "unless", "bool", "by", "offset", "without"}


def metrics_of(expression: str) -> set[str]:
    """Names of the metrics in a PromQL expression."""
    bare = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^\]]*\]|\b(by|on|without) \([^)]*\)', " ", expression)
    return set(re.findall(r"(?<![\w.])[a-zA-Z_:][\w:]*\b(?!\s*\()", bare)) - OPERATORS


def test_metrics_of_an_expression_are_found() -> None:
    promql = 'sum by (le, route) (rate(a_bucket{x="b{c}", y=~"5.."}[5m])) > 1.5e9 or time() - d_total unless on_e'
    assert metrics_of(promql) == {"a_bucket", "d_total", "on_e"}


def promtool(*arguments: str) -> None:
    done = subprocess.run([program("promtool"), *arguments], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAILED" not in done.stdout


def test_promtool_accepts_the_configuration_and_alert_tests_pass(tmp_path: Path) -> None:
    promtool("check", "rules", str(PROMETHEUS / "alerts.yml"))
    config = tmp_path / "prometheus.yml"
    config.write_text(yaml.safe_dump({**CONFIG, "rule_files": [str(PROMETHEUS / "alerts.yml")]}))
    promtool("check", "config", str(config))
    promtool("test", "rules", str(ALERTS), str(ALERTS.with_name("alerts_of_a_day.yml")))


def test_each_alert_has_a_test() -> None:
    (fire,) = yaml.safe_load(ALERTS.read_text())["tests"][1]["promql_expr_test"]
    tested = [sample["labels"] for sample in fire["exp_samples"]]
    assert tested == [f'{{alertname="{rule["alert"]}"}}' for rule in RULES]
    for rule in RULES:
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]


def test_the_runbook_has_a_section_for_each_alert() -> None:
    page = "docs/how-to/operate/runbook.md"
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL))
    assert sections.keys() == {rule["alert"] for rule in RULES}
    for rule in RULES:
        section = sections[rule["alert"]]
        if "for" in rule:
            lasting = f"{rule['for'][:-1]} {'hour' if rule['for'].endswith('h') else 'minute'}"
        else:
            window, step, unit, steps = re.findall(r"\)\[(\d+)m:(\d+)(s|m)\]\) > (\d+)", rule["expr"])[0]
            minutes = int(steps) * int(step) // (60 if unit == "s" else 1)
            lasting = f"{minutes} minute"
            assert f" {minutes} of {window} minutes" in section, rule["alert"]
        assert f"Severity `{rule['labels']['severity']}`, after {lasting}" in section, rule["alert"]
        parts = re.findall(r"^\*\*(\w+):\*\*|^(```sh)$", section, re.MULTILINE)
        found = ["".join(part) for part in parts]
        assert found[:5] == ["Meaning", "Impact", "Check", "```sh", "Fix"], rule["alert"]
        assert set(found[5:-1]) <= {"```sh"}, rule["alert"]  # a fix may have commands to copy
        assert found[-1] == "Ends", rule["alert"]
        for causes in re.findall(r'lisarec_store_errors_total\{cause=~?"([^"]*)"', rule["expr"]):
            assert all(f"`{cause}`" in section for cause in causes.split("|")), rule["alert"]
        assert rule["annotations"]["runbook"] == f"{page}#{rule['alert'].lower()}"


def test_each_cause_of_store_failures_has_an_alert() -> None:
    alerted = set()
    for rule in RULES:
        for causes in re.findall(r'lisarec_store_errors_total\{cause=~?"([^"]*)"', rule["expr"]):
            alerted.update(causes.split("|"))
    elsewhere = {"unsafe": "StoreDistrusted", "busy": "RequestsFail"}  # and "closed" is a process that ends
    assert alerted == set(FAILURE_CAUSES) - elsewhere.keys() - {"closed"}
    assert set(elsewhere.values()) <= {rule["alert"] for rule in RULES}


def test_scrape_targets_match_the_compose_file() -> None:
    services = COMPOSE["services"]
    ports = {
        name: config["port"]
        for job in CONFIG["scrape_configs"]
        for config in job.get("dns_sd_configs", ())
        for name in config["names"]
    }
    assert ports.keys() == {"app", "archive", "trainer", "consume", "publish", "haproxy"}
    assert f"LISAREC_PORT={ports['app']}" in (ROOT / "docker" / "Dockerfile").read_text()
    for name in ("archive", "trainer", "consume", "publish"):
        assert f"[::]:{ports[name]}" in " ".join(services[name]["command"])
    assert services["haproxy"]["environment"]["LISAREC_METRICS_BIND"] == f":{ports['haproxy']}"
    for name in ports:
        assert set(services["prometheus"]["networks"]) & set(services[name]["networks"]), name
    assert services["app"]["environment"]["LISAREC_OPEN_METRICS"] == "true"
    mounted = [volume.split(":")[1] for volume in services["prometheus"]["volumes"]]
    assert set(CONFIG["rule_files"]) < set(mounted)


def test_the_dashboard_is_complete() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    (source,) = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    for panel in PANELS:
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)
        for target in [panel, *panel["targets"]]:
            assert target["datasource"] == {"type": "prometheus", "uid": source["uid"]}
    (provider,) = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "lisarec.yml").read_text())["providers"]
    mounts = dict(volume.split(":")[:2][::-1] for volume in COMPOSE["services"]["grafana"]["volumes"])
    assert mounts[provider["options"]["path"]] == "./docker/grafana/dashboards"
    assert mounts["/etc/grafana/provisioning"] == "./docker/grafana/provisioning"


def test_the_dashboard_filters_by_namespace() -> None:
    (variable,) = DASHBOARD["templating"]["list"]
    assert (variable["name"], variable["allValue"]) == ("namespace", ".*")  # also without the label, as with Compose
    assert variable["current"]["value"] == "$__all"
    for expression in EXPRESSIONS:
        selectors = len(re.findall(r"\b(?:lisarec_|haproxy_|process_)\w+|\bup\b|\bALERTS\b", expression))
        assert selectors == expression.count('namespace=~"$namespace"}') > 0, expression


@pytest.fixture(scope="module")
def watched(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    directory = tmp_path_factory.mktemp("watched")
    often = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    try:
        with ExitStack() as stack:
            running = stack.enter_context(topology(model_dir, 1))
            brokers = stack.enter_context(mock_brokers())
            brokers.create_topic("clicks", 1)
            produce(brokers.addresses, "clicks", [("ada", b"poison")])
            consumer = ConsumerProcess(directory, brokers.addresses, "clicks", running.url)
            stack.callback(consumer.end)
            brokers.create_topic("log", 1)
            store = {"redis_url": running.redis_url}
            publisher = PublisherProcess(directory, brokers.addresses, "log", store, "--every", 0.5)
            stack.callback(publisher.end)
            found = stack.enter_context(
                monitoring.monitored(
                    running,
                    directory,
                    ["--every", "1"],
                    models=model_dir.parent,
                    others={"consume": consumer.metrics_address, "publish": publisher.metrics_address},
                    every_s=often,
                )
            )
            drive(running.url, f"http://{running.replicas[0].address}:{running.replica_port}")
            wait_until(lambda: is_up(found), (directory / "prometheus.log").read_text)
            yield found
    except FileNotFoundError as exc:  # CI turns this into a failure
        pytest.skip(str(exc))


def drive(url: str, replica: str) -> None:
    """Send requests that cover every counter; the load balancer passes no administration on."""
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        event = {"event_id": "e", "user_id": "ada", "item_id": "item-1"}
        for body in (event, event, [{"user_id": "ada", "item_id": "nowhere"}]):
            client.post("/v1/events", json=body).raise_for_status()
        for user in ("ada", "nobody"):
            client.get(f"/v1/users/{user}/recommendations?exclude_seen=all").raise_for_status()
        client.put(f"{replica}/v1/admin/scenarios/home", json={"k": 2}).raise_for_status()
        answer = client.get("/v1/users/nobody/recommendations?scenario=home").raise_for_status().json()
        for candidates in (["item-1"], []):  # a short list, and an empty one
            request = {"user_id": "nobody", "scenario": "home", "candidates": candidates}
            client.post("/v1/recommendations", json=request).raise_for_status()
        clicked = {"event_id": "c", "user_id": "nobody", "item_id": answer["items"][0]["item_id"]}
        click = clicked | {"recommendation_id": answer["recommendation_id"]}
        client.post("/v1/events", json=click).raise_for_status()


def is_up(watched: Prometheus) -> bool:
    try:
        return (
            len(watched.query("up == 1")) == 7
            and watched.number("lisarec_trainer_rounds_total") > 0
            and len(watched.query("lisarec_publish_through_timestamp_seconds > 0")) > 0
            and "lisarec_archive_through_timestamp_seconds" in watched.names()
            and {"lisarec_consume_lag_records", "lisarec_scenario_events_total"} <= watched.names()
            and len(watched.query("rate(lisarec_store_seconds_count[1m])")) > 0
        )
    except httpx.TransportError:
        return False


def test_dashboards_and_alerts_use_existing_metrics(watched: Prometheus) -> None:
    wanted = {name for expression in [*DRAWN, *(rule["expr"] for rule in RULES)] for name in metrics_of(expression)}
    assert len(wanted) > 25
    assert wanted - PROMETHEUS_OWN <= watched.names()


def test_every_panel_shows_data(watched: Prometheus) -> None:
    may_be_empty = (
        'status=~"5..|429"',
        "store_errors_total",
        "limit_bytes",
        "generation_timestamp_seconds",
        "ndcg_at_10",
    )
    wanted = [expression for expression in DRAWN if not any(part in expression for part in may_be_empty)]

    def empty() -> list[str]:
        return [expression for expression in wanted if not watched.query(expression)]

    wait_until(lambda: not empty(), empty)  # a rate needs two scrapes


def test_scraped_values_equal_the_requests_sent(watched: Prometheus) -> None:
    """Sooner or later: each scrape is a moment of one process alone, and one that takes a second is none."""
    counts = {
        'lisarec_events_total{outcome="accepted"}': 3,
        'lisarec_events_total{outcome="duplicate"}': 1,
        'lisarec_events_total{outcome="unknown_item"}': 1,
        'lisarec_archive_events_total{done="archived"}': 3,
        'lisarec_request_seconds_count{route="/v1/events"}': 4,
        "lisarec_publish_entries_total": 3,
    }

    def seen() -> dict[str, float]:
        return {name: watched.number(name) for name in counts}

    wait_until(lambda: seen() == counts, seen)
    for bound in (
        'haproxy_frontend_http_responses_total{proxy="service", code="2xx"} >= 5',
        f"time() - lisarec_archive_through_timestamp_seconds >= 0 < {PATIENCE_S}",
        f"time() - lisarec_publish_through_timestamp_seconds >= 0 < {PATIENCE_S}",
        "lisarec_redis_used_bytes > 1e5",
    ):
        wait_until(lambda bound=bound: watched.query(bound), lambda bound=bound: bound)  # type: ignore[misc]
