"""One run is one MLflow run: against a real database, and against a server that is not there."""

import logging
import math
import os
import socket
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from lwray.errors import UserError
from lwray.tracking import mlflow_run
from lwray.tracking.follow import Point
from lwray.tracking.mlflow_run import MlflowRun, default_uri
from lwray.tracking.secrets import masked


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return default_uri(tmp_path_factory.mktemp("storage"))


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")


def _open(uri: str, existing_id: str | None = None, **params: str) -> MlflowRun:
    return MlflowRun.open(uri, "tests", "gpt", existing_id, params, {"attempt": "1"})


def _points(*steps: int, name: str = "train/loss") -> list[Point]:
    return [Point(name, 1.0 / (step + 1), step, 1000 + step) for step in steps]


def _recorded(uri: str, run: MlflowRun, metric: str = "train/loss") -> list[int]:
    return [point.step for point in MlflowClient(uri).get_metric_history(run.id, metric)]


def test_a_run_that_starts_again_is_the_same_mlflow_run(uri: str) -> None:
    first = _open(uri, lr="0.1")
    assert first.last_step("train/loss") == -1
    first.log(_points(0, 1, 2))
    first.end("KILLED")
    client = MlflowClient(uri)
    assert client.get_run(first.id).info.status == "KILLED"

    second = _open(uri, first.id, lr="0.2", workers="4")
    assert second.id == first.id
    assert second.last_step("train/loss") == 2
    assert client.get_run(first.id).info.status == "RUNNING"
    second.log(_points(3))
    second.end("FINISHED")
    run = client.get_run(first.id)
    assert run.info.status == "FINISHED"
    assert run.data.params == {"lr": "0.1", "workers": "4"}
    assert run.data.tags["attempt"] == "1"
    assert _recorded(uri, second) == [0, 1, 2, 3]
    assert len(client.search_runs([run.info.experiment_id])) == 1


def test_many_points_and_many_long_parameters_are_recorded_in_batches(uri: str) -> None:
    run = _open(uri, **{f"key{i}": "x" * 7000 for i in range(205)})
    run.log([*_points(*range(2100)), Point("val/loss", math.nan, 5, 1)])
    assert len(_recorded(uri, run)) == 2100
    params = MlflowClient(uri).get_run(run.id).data.params
    assert len(params) == 205
    assert {len(value) for value in params.values()} == {6000}
    assert _open(uri, run.id).last_step("val/loss") == 5
    run.end("FINISHED")


def test_artifacts_lie_beside_the_database(uri: str, tmp_path: Path) -> None:
    run = _open(uri)
    (tmp_path / "config.toml").write_text("x")
    run.artifact(tmp_path / "config.toml")
    storage = Path(uri.removeprefix("sqlite:///")).parent
    assert [path.name for path in storage.glob("mlartifacts/**/config.toml")] == ["config.toml"]
    run.end("FINISHED")


def test_a_run_deleted_in_mlflow_is_recorded_anew(uri: str) -> None:
    first = _open(uri)
    MlflowClient(uri).delete_run(first.id)
    assert _open(uri, first.id).id != first.id
    assert _open(uri, "0" * 32).id != first.id


def test_a_server_that_goes_away_stops_nothing_and_gets_its_points_later(
    uri: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _open(uri)
    there = run._client
    run._client = _absent_server()
    with caplog.at_level(logging.WARNING, logger=mlflow_run.__name__):
        run.log(_points(0, 1))
        run.log(_points(2))
    assert run.failures == 2
    assert len(caplog.records) == 1
    run._client = there
    run.log(_points(3))
    assert _recorded(uri, run) == [0, 1, 2, 3]

    run._client = _absent_server()
    monkeypatch.setattr(mlflow_run, "MOST_PENDING", 3)
    run.log(_points(4, 5, 6, 7, 8))
    assert run.lost == 2
    caplog.clear()
    run.end("FINISHED")
    assert "lacks 5 points" in caplog.text


def test_a_server_that_cannot_be_reached_at_the_start_is_the_users_to_mend() -> None:
    address = f"http://me:hunter2@127.0.0.1:{_free_port()}"
    with pytest.raises(UserError, match=r"tracking\.enabled=false") as caught:
        _open(address)
    assert "hunter2" not in str(caught.value)
    assert "***@127.0.0.1" in str(caught.value)


def test_opening_reports_nothing_to_mlflows_makers(uri: str) -> None:
    _open(uri).end("FINISHED")
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


def test_credentials_are_masked_wherever_they_stand() -> None:
    assert masked("at postgresql://u:p@db/x and s3://a@b") == "at postgresql://***@db/x and s3://***@b"
    assert masked("sqlite:////tmp/a@b.db") == "sqlite:////tmp/a@b.db"


def _absent_server() -> MlflowClient:
    return MlflowClient(f"http://127.0.0.1:{_free_port()}")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
