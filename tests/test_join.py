"""A cluster that cannot be joined: one sentence, exit code 2, and soon."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_ranks import TOY_KEYS
from ray_cluster import RayCluster, free_port, ray_cluster

from lwray.errors import ExitCode

OTHER_VERSION = """
import json, ray
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
ray.init(logging_level="error", log_to_driver=False)
known = json.loads(_internal_kv_get(b"CLUSTER_METADATA", namespace=b"cluster"))
known["ray_version"] = "2.1.0"
_internal_kv_put(b"CLUSTER_METADATA", json.dumps(known).encode(), overwrite=True, namespace=b"cluster")
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster(1) as cluster:
        yield cluster


def train(storage: Path, environment: dict[str, str]) -> tuple[int, str]:
    (storage / "toy.toml").touch()
    command = [sys.executable, "-m", "lwray", "train", str(storage / "toy.toml"), f"--storage={storage}", *TOY_KEYS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=55, check=False)
    return done.returncode, done.stderr


# Ray asks for 20 s until it believes that it is not let in
@pytest.mark.slow
@pytest.mark.parametrize("token", ["0" * 64, ""], ids=["wrong", "missing"])
def test_a_token_that_is_not_the_clusters(cluster: RayCluster, tmp_path: Path, token: str) -> None:
    code, said = train(tmp_path, cluster.joined() | {"RAY_AUTH_TOKEN": token})
    assert code == ExitCode.BAD_INPUT
    assert "does not let this process in" in said
    assert "RAY_AUTH_TOKEN" in said


def test_an_address_where_nothing_listens(tmp_path: Path) -> None:
    began = time.monotonic()
    code, said = train(tmp_path, os.environ | {"RAY_ADDRESS": f"127.0.0.1:{free_port()}"})
    assert code == ExitCode.BAD_INPUT
    assert "No Ray cluster answers" in said
    assert time.monotonic() - began < 30


def test_ray_client_is_refused(tmp_path: Path) -> None:
    code, said = train(tmp_path, os.environ | {"RAY_ADDRESS": "ray://127.0.0.1:10001"})
    assert code == ExitCode.BAD_INPUT
    assert "ray job submit" in said


@pytest.mark.slow
def test_another_version_of_ray_on_the_cluster(cluster: RayCluster, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", OTHER_VERSION], env=cluster.joined(), check=True, timeout=55)
    code, said = train(tmp_path, cluster.joined())
    assert code == ExitCode.BAD_INPUT
    assert "Version mismatch: The cluster was started with: Ray: 2.1.0" in said
    assert "Use the same versions" in said
