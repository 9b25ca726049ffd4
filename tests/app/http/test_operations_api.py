"""Endpoints for operators: health, metrics, the model, the OpenAPI document, and settings."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonschema_rs import Draft202012Validator
from pydantic import ValidationError

from app.http.openapi import component_schemas
from app.schemas.events import PostedEvent
from app.schemas.items import ItemWords, PostedItem
from app.schemas.recommendations import RecommendationBatch, RecommendationRequest
from app.schemas.scenarios import ScenarioPreview
from app.settings import Settings, problem_of_unknown_variables
from model.artifact.model_directory import load
from tests.app.conftest import ITEMS, Client
from tests.app.support import recommend


def test_a_draining_process_is_alive_but_not_ready(client: Client) -> None:
    assert client.get("/readyz").json() == {"status": "ready"}
    client.services.draining = True
    draining = client.get("/readyz")
    assert (draining.status_code, draining.json()["error"]["code"]) == (503, "draining")
    assert client.get("/healthz").json() == {"status": "ok"}
    client.click("ada", "item-1")  # what comes is still answered


def test_a_process_without_its_gpu_is_not_ready_and_returns_popular_items(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.click("ada", "item-1")
    engine = client.service.switcher.current.engine

    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: unspecified launch failure")

    def lose() -> bool:
        engine.is_lost = True
        return True

    monkeypatch.setattr(engine, "rank_states", fail)
    with pytest.raises(RuntimeError, match="unspecified launch failure"):  # of a device that still answers
        client.recommend("ada")
    assert client.get("/readyz").status_code == 200
    monkeypatch.setattr(engine, "has_lost_device", lose)
    assert client.recommend("ada")["source"] == "popular"
    lost = client.get("/readyz")
    assert (lost.status_code, lost.json()["error"]["code"]) == (503, "device_lost")
    monkeypatch.setattr(engine, "has_lost_device", fail)  # nobody asks again
    assert client.recommend("ada")["source"] == "popular"


def lose_gpu(client: Client, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Make the GPU of the service fail from the next call of this engine method on."""
    engine = client.service.switcher.current.engine

    def fail(*_: Any) -> Any:
        raise RuntimeError("CUDA error: unspecified launch failure")

    def lose() -> bool:
        engine.is_lost = True
        return True

    monkeypatch.setattr(engine, method, fail)
    monkeypatch.setattr(engine, "has_lost_device", lose)


@pytest.mark.parametrize("method", ["rank_states", "top_k", "explain", "prepare_similarity"])
def test_losing_the_gpu_at_any_step_fails_no_request(
    client: Client, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    client.click("ada", "item-1")
    lose_gpu(client, monkeypatch, method)
    for _ in range(2):
        if method == "prepare_similarity":
            response = client.get("/v1/items/item-1/similar")
            assert (response.status_code, response.json()["source"]) == (200, "popular")
        else:
            basket = ["item-2"] if method == "top_k" else []  # whose complements are lifted between step and scan
            assert recommend(client, user_id="ada", explain=True, basket=basket)["source"] == "popular"
    assert client.get("/readyz").json()["error"]["code"] == "device_lost"


def test_events_on_cold_items_are_logged_after_losing_the_gpu(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.click("ada", "item-1")
    client.click("bea", "new")  # is watched from now on
    lose_gpu(client, monkeypatch, "step")
    client.click("ada", "new", "item-2")
    client.click("ada", "new")
    assert [event.item_id for event in client.log("ada")] == ["item-1", "new", "item-2", "new"]
    assert client.get("/readyz").json()["error"]["code"] == "device_lost"


def test_events_are_logged_even_if_assigning_codes_fails(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client.click("ada", "item-1")
    client.click("bea", "new")
    with monkeypatch.context() as patch:
        lose_gpu(client, patch, "step")
        patch.setattr(client.service.switcher.current.engine, "has_lost_device", lambda: False)
        client.click("ada", "new")
    assert caplog.text.count("cannot learn from events on new items") == 1
    client.click("ada", "new")
    assert [event.item_id for event in client.log("ada")] == ["item-1", "new", "new"]


def test_a_service_without_a_gpu_starts_on_the_cpu_with_a_warning(
    start: Callable[..., Client], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    client = start(tmp_path, device="cuda")
    client.click("ada", "item-1")
    assert client.recommend("ada")["source"] == "personalised"
    assert client.get("/readyz").status_code == 200
    client.close()
    assert "ranking model 'tiny' on the CPU: device 'cuda' is not available: torch finds no GPU" in caplog.text


def test_the_model_is_described(shared_client: Client, model_dir: Path) -> None:
    model = shared_client.get("/v1/model").json()
    assert (model["generation"], model["tag"], model["items"]) == ("tiny", load(model_dir).tag, ITEMS)
    assert model["config"]["model"]["history_codebooks"] == 3
    assert model["metrics"] == {"loss": 1.5}


def test_metrics_count_events_lists_and_requests(client: Client) -> None:
    events = [
        {"user_id": "ada", "item_id": "item-1", "event_id": "a", "timestamp": 2_000},
        {"user_id": "ada", "item_id": "item-1", "event_id": "a", "timestamp": 2_000},
        {"user_id": "ada", "item_id": "item-2", "timestamp": 1_000},
        {"user_id": "ada", "item_id": "not-in-the-catalogue"},
    ]
    client.post("/v1/events", json=events)
    client.recommend("ada")
    client.recommend("nobody")
    client.get("/v1/users/nobody")
    client.get("/no/such/path")
    client.request("BREW", "/healthz")
    lines = client.get("/metrics").text.splitlines()
    for line in (
        'lisarec_events_total{outcome="accepted"} 3.0',
        'lisarec_events_total{outcome="duplicate"} 1.0',
        'lisarec_events_total{outcome="unknown_item"} 1.0',
        'lisarec_events_total{outcome="late"} 1.0',
        'lisarec_recommendations_total{source="personalised"} 1.0',
        'lisarec_recommendations_total{source="popular"} 1.0',
        'lisarec_request_seconds_count{method="GET",route="/v1/users/{user_id}/recommendations",status="200"} 2.0',
        'lisarec_request_seconds_count{method="GET",route="/v1/users/{user_id}",status="404"} 1.0',
        'lisarec_request_seconds_count{method="GET",route="unmatched",status="404"} 1.0',
    ):
        assert line in lines
    assert not any("ada" in line or "BREW" in line for line in lines)


def test_two_services_in_a_process_have_separate_metrics(client: Client, shared_client: Client) -> None:
    client.click("ada", "item-1")
    shared_client.click("ada", "item-1", "item-2")
    assert 'lisarec_events_total{outcome="accepted"} 1.0' in client.get("/metrics").text


def test_openapi_has_examples_and_the_common_error_schema(shared_client: Client) -> None:
    document = shared_client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    assert "HTTPValidationError" not in schemas
    operations = {
        (method, path): operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
    assert operations  # as many as docs/reference/http-api.md has sections
    for (method, path), operation in operations.items():
        if method in ("post", "put") and not path.endswith("/activate"):
            assert operation["requestBody"]["content"]["application/json"]["examples"]
        assert all(one["examples"] for one in operation.get("parameters", []) if one["in"] == "path")
        for status, response in operation["responses"].items():
            if path == "/metrics" and status == "200":
                assert list(response["content"]) == ["text/plain"]
                assert response["content"]["text/plain"]["example"]
                continue
            schema = response["content"]["application/json"]["schema"]
            name = schema.get("anyOf", [schema])[0]["$ref"].rpartition("/")[2]
            assert schemas[name]["examples"]
            assert (name == "ErrorBody") == (int(status) >= 400)


def test_every_operation_lists_its_possible_errors(shared_client: Client) -> None:
    document = shared_client.get("/openapi.json").json()
    for method, path, operation in operations_of(document):
        responses = operation["responses"]
        expected = {"422", "431", "503"} | ({"400", "408", "413", "415"} if "requestBody" in operation else set())
        assert expected <= responses.keys(), (method, path)
        for status in {"429", "503"} & responses.keys():
            assert responses[status]["headers"]["Retry-After"]["schema"] == {"type": "integer"}


def test_every_openapi_reference_resolves(shared_client: Client) -> None:
    document = shared_client.get("/openapi.json").json()
    references = set(re.findall(r'"\$ref": "#/([^"]+)"', json.dumps(document)))
    assert references
    for reference in references:
        found = document
        for step in reference.split("/"):
            found = found[step]
    assert document["components"]["schemas"]["Pin"]["required"] == ["item_id", "place"]


def operations_of(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def body_of(operation: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    return body


def test_operations_and_bodies_have_names_for_generated_clients(shared_client: Client) -> None:
    document = shared_client.get("/openapi.json").json()
    ids = [operation["operationId"] for _, _, operation in operations_of(document)]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch("[a-z]+(_[a-z]+)+", name) for name in ids)
    bodies = {
        operation["operationId"]: body["schema"]
        for *_, operation in operations_of(document)
        if (body := body_of(operation))
    }
    taking = [path for method, path, _ in operations_of(document) if method in ("post", "put")]
    assert len(bodies) == sum(not path.endswith("/activate") for path in taking) > 0
    for schema in bodies.values():
        for one in schema.get("anyOf", [schema]):
            assert "$ref" in one.get("items", one)
    models = [PostedEvent, PostedItem, ItemWords, RecommendationRequest, RecommendationBatch, ScenarioPreview]
    for name, schema in component_schemas(*models).items():
        described = document["components"]["schemas"][name]
        assert described.keys() == schema.keys()
        assert described.get("properties", {}).keys() == schema.get("properties", {}).keys()


def test_examples_match_their_schemas(shared_client: Client) -> None:
    document = shared_client.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    said = [
        ({"$ref": f"#/components/schemas/{name}"}, one)
        for name, schema in schemas.items()
        for one in schema.get("examples", [])
    ]
    for *_, operation in operations_of(document):
        described = [*operation.get("parameters", []), *filter(None, [body_of(operation)])]
        said += [(one["schema"], example["value"]) for one in described for example in one.get("examples", {}).values()]
    assert len(said) > 60
    for schema, example in said:
        checked = Draft202012Validator({**schema, "components": document["components"]}, validate_formats=True)
        assert not [error.message for error in checked.iter_errors(example)], example


def test_the_service_accepts_the_openapi_examples(client: Client) -> None:
    """Except sealed states, which no example can contain, and data that this service lacks."""
    document, taken = client.get("/openapi.json").json(), 0
    missing = ("sealing_not_configured", "model_not_found", "scenario_not_found")
    client.request("PUT", "/v1/admin/properties", json={"items": {"price": "number", "brand": "text"}})
    for method, path, operation in operations_of(document):
        for name, example in body_of(operation).get("examples", {}).items():
            at = path.format(user_id="ada", item_id="tea-2", name="product-page")
            answer = client.request(method.upper(), at, json=example["value"])
            code = answer.json().get("error", {}).get("code")
            assert answer.is_success or code in missing, (path, name, answer.text)
            taken += answer.is_success
    assert taken > 20


def schemas_in(node: Any) -> Iterator[dict[str, Any]]:
    """All objects of the document except examples."""
    for one in node if isinstance(node, list) else [part for name, part in node.items() if name != "examples"]:
        if isinstance(one, dict | list):
            yield from schemas_in(one)
    if isinstance(node, dict):
        yield node


def test_generated_clients_have_types_for_every_schema(shared_client: Client) -> None:
    document = shared_client.get("/openapi.json").json()
    schemas = list(schemas_in(document))
    assert all("patternProperties" not in schema for schema in schemas)  # generators type only additionalProperties
    assert all(
        "type" in one or "$ref" in one or "anyOf" in one for schema in schemas for one in schema.get("anyOf", ())
    )
    assert all("schema" in one for schema in schemas for one in schema.get("content", {}).values())
    because = document["components"]["schemas"]["RecommendationRequest"]["properties"]["because"]["anyOf"]
    assert [one["type"] for one in because] == ["string", "null"]


def test_patterns_are_ascii_for_generated_clients(shared_client: Client) -> None:
    schemas = schemas_in(shared_client.get("/openapi.json").json())
    patterns = {one["pattern"] for one in schemas if one.get("type") == "string" and "pattern" in one}
    assert patterns
    assert [one for one in patterns if not one.isascii() or re.search(r"\\x[89a-f]|\\u|\\p", one)] == []


@pytest.mark.parametrize(("text", "is_id"), [("Größe 1", True), ("a\x80b", False), ("a\x1fb", False), ("..", False)])
def test_the_openapi_pattern_of_ids_equals_the_validation(shared_client: Client, text: str, is_id: bool) -> None:
    schema = shared_client.get("/openapi.json").json()["components"]["schemas"]["MergeRequest"]
    assert Draft202012Validator(schema).is_valid({"from": text}) == is_id
    assert (shared_client.post("/v1/users/ada/merge", json={"from": text}).status_code == 200) == is_id


def test_numbers_have_double_precision_in_generated_clients(shared_client: Client) -> None:
    numbers = [one for one in schemas_in(shared_client.get("/openapi.json").json()) if one.get("type") == "number"]
    assert len(numbers) > 50
    assert {one.get("format") for one in numbers} == {"double"}


def test_sending_every_documented_default_changes_no_list(client: Client) -> None:
    document = client.get("/openapi.json").json()
    client.request("PUT", "/v1/admin/scenarios/home", json={"k": 12, "rotation": 0.5, "exclude_seen": "none"})
    client.post("/v1/events", json=[{"user_id": "ada", "item_id": f"item-{n}", "type": "purchase"} for n in (1, 2)])
    fields = document["components"]["schemas"]["RecommendationRequest"]["properties"]
    body_defaults = {name: field["default"] for name, field in fields.items() if "default" in field}
    assert {"user_id", "history"} <= body_defaults.keys()
    parameters = document["paths"]["/v1/users/{user_id}/recommendations"]["get"]["parameters"]
    defaults = {one["name"]: one["schema"]["default"] for one in parameters if "default" in one["schema"]}
    for options in ({"scenario": "home"}, {"mode": "repeat"}, {}):
        items = client.recommend("ada", **options)["items"]
        assert client.recommend("ada", **{**defaults, **options})["items"] == items
        posted = client.post("/v1/recommendations", json={**body_defaults, "user_id": "ada", **options})
        assert posted.json().get("items") == items


def test_a_service_without_keys_documents_them_as_optional(shared_client: Client) -> None:
    document = shared_client.get("/openapi.json").json()
    (scheme,) = document["components"]["securitySchemes"]
    for _, path, operation in operations_of(document):
        if path in ("/healthz", "/readyz"):
            assert operation["security"] == []
        else:
            without, with_key = operation["security"]
            assert (without, [*with_key]) == ({}, [scheme])
            assert operation["responses"].keys() >= {"401", "403", "429"}


def test_arguments_override_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISAREC_MODEL_DIR", "models/a")
    monkeypatch.setenv("LISAREC_PORT", "9000")
    monkeypatch.setenv("LISAREC_REDIS_URL", "")
    settings = Settings(port=9001)
    assert (settings.model_dir, settings.port, settings.redis_url) == (Path("models/a"), 9001, None)
    assert settings.host == "127.0.0.1"


@pytest.mark.parametrize("address", ["tcp://10.0.0.1:8000", "tcp://[fd00::1]:80", "udp://10.0.0.1:53"])
def test_the_port_variable_of_kubernetes_is_ignored(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISAREC_PORT", address)
    monkeypatch.setenv("LISAREC_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("LISAREC_SERVICE_PORT", "8000")
    assert problem_of_unknown_variables() is None
    assert Settings().port == Settings.model_fields["port"].default
    assert Settings(port=9001).port == 9001


@pytest.mark.parametrize("port", ["tcp://10.0.0.1", "http://10.0.0.1:8000", "8000/tcp", "tcp://10.0.0.1:8000 9000"])
def test_values_similar_to_the_kubernetes_variable_are_refused(port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISAREC_PORT", port)
    with pytest.raises(ValidationError, match="port"):
        Settings()


def test_log_levels_may_be_uppercase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISAREC_LOG_LEVEL", "INFO")
    assert Settings().log_level == "info"


def test_exported_settings_round_trip_to_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    tenants = {"books": Path("models/books/a")}
    settings = Settings(
        model_dir=Path("models/a b"), drain_s=0.5, workers=3, tenant="shop", tenants=tenants, keys_file=Path("k")
    )
    for name in Settings.model_fields:
        monkeypatch.delenv(f"LISAREC_{name.upper()}", raising=False)
        monkeypatch.setenv(f"LISAREC_{name.upper()}", "")  # so that what is exported is taken back afterwards
    settings.export()
    assert Settings() == settings


@pytest.mark.parametrize("wrong", [{"port": 70_000}, {"workers": 0}, {"device": "tpu"}, {"drain_s": -1}])
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Settings(model_dir=Path("models/a"), **wrong)
