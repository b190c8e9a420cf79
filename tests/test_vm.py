"""The files of cluster/vm go through the launcher of `ray up` as far as it goes without machines."""

import copy
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from jsonschema import ValidationError
from moto import mock_aws
from ray.autoscaler._private.commands import _bootstrap_config
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).parents[1]
VM = ROOT / "cluster/vm"
START, WATCH = VM / "start_ray.sh", VM / "watch_spot.sh"
FILES = ["aws", "onprem"]
DRAIN = r"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=(\d+)"


def read(name: str) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((VM / f"{name}.yaml").read_text())
    return config


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The launcher writes keys and caches into the home and the temporary directory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(ROOT)
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_ray_refuses_a_slip_of_the_pen(name: str) -> None:
    with pytest.raises(ValidationError, match="setup_command'"):
        validate_config(prepare_config(read(name) | {"setup_command": []}))


def test_the_local_launcher_takes_the_file_and_all_machines(own_home: Path) -> None:
    config = _bootstrap_config(read("onprem"), no_config_cache=True)
    [node] = config["available_node_types"].values()
    assert node["min_workers"] == node["max_workers"] == len(config["provider"]["worker_ips"])


def test_on_aws_workers_are_spot_and_the_head_is_not(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of `ray up` before its first machine, with an AWS in this process."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    with mock_aws(config={"iam": {"load_aws_managed_policies": True}}):
        role = "ray-autoscaler-v1"
        iam = boto3.client("iam", region_name="us-west-2")
        # with the role there, the launcher does not wait for AWS to spread it
        iam.create_instance_profile(InstanceProfileName=role)
        iam.create_role(RoleName=role, AssumeRolePolicyDocument="{}")
        iam.add_role_to_instance_profile(InstanceProfileName=role, RoleName=role)
        config = _bootstrap_config(read("aws"), no_config_cache=True)
    head, worker = (config["available_node_types"][name] for name in ("head", "worker"))
    assert "InstanceMarketOptions" not in head["node_config"]
    assert head["resources"] == {"CPU": 0}
    assert head["max_workers"] == 0
    assert worker["node_config"]["InstanceMarketOptions"] == {"MarketType": "spot"}
    assert worker["resources"]["CPU"] == 48
    assert worker["resources"]["GPU"] == 4
    assert 0 < worker["min_workers"] <= worker["max_workers"] <= config["max_workers"]


@pytest.mark.parametrize("name", FILES)
def test_nodes_get_the_package_and_the_token(name: str) -> None:
    mounts = copy.copy(read(name)["file_mounts"])
    assert mounts.pop("~/.ray/auth_token") == "~/.ray/auth_token"
    assert {remote: f"~/lwray/{local}" for remote, local in mounts.items()} == {remote: remote for remote in mounts}
    assert all((ROOT / local).exists() for local in mounts.values())
    # the build reads these, and the start commands run this
    assert {"Makefile", "pyproject.toml", "README.md", "lwray", "cluster/vm"} == set(mounts.values())
    for starts, *more in (read(name)["head_start_ray_commands"], read(name)["worker_start_ray_commands"]):
        assert starts.startswith("~/lwray/cluster/vm/start_ray.sh --")
        assert more in ([], [f"~/lwray/cluster/vm/{WATCH.name}"])
    assert START.stat().st_mode & 0o111


@pytest.mark.parametrize("name", FILES)
def test_the_dashboard_is_not_open_to_the_network(name: str) -> None:
    [head] = read(name)["head_start_ray_commands"]
    assert "--dashboard-host=127.0.0.1" in head


def unit(tmp_path: Path, *command: str) -> list[str]:
    """What a script gives to systemd-run."""
    sudo = tmp_path / "sudo"
    # nothing to stop yet, then the unit
    sudo.write_text('#!/bin/sh\n[ "$1" = systemctl ] && exit 1\nprintf "%s\\n" "$@"\n')
    sudo.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": "/home/user", "RAY_HEAD_IP": "192.0.2.1"}
    environment["RAY_OVERRIDE_RESOURCES"] = '{"CPU": 0, "a b": 1}'
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=20)
    words = result.stdout.splitlines()
    assert words[0] == "systemd-run"
    return words


def test_ray_becomes_a_unit_that_drains_before_it_ends(tmp_path: Path) -> None:
    words = unit(tmp_path, str(START), "--address=192.0.2.1:6379")
    assert words[-4:] == ["/home/user/lwray/.venv/bin/ray", "start", "--block", "--address=192.0.2.1:6379"]
    assert {
        "--property=KillMode=mixed",
        "--setenv=RAY_AUTH_MODE=token",
        "--setenv=RAY_HEAD_IP=192.0.2.1",
        '--setenv=RAY_OVERRIDE_RESOURCES={"CPU": 0, "a b": 1}',
    } <= set(words)
    [stop] = re.findall(r"TimeoutStopSec=(\d+)", "\n".join(words))
    [drain] = re.findall(DRAIN, "\n".join(words))
    assert 0 < int(drain) <= int(stop) - 10


def test_spot_workers_have_a_unit_that_hears_of_their_end(tmp_path: Path) -> None:
    words = unit(tmp_path, str(WATCH))
    assert words[-3:] == ["/home/user/lwray/.venv/bin/python", "-m", "lwray.cluster.spot"]
    assert {"--property=Restart=on-failure", "--setenv=RAY_AUTH_MODE=token"} <= set(words)
    # at SIGTERM it must not say anything else than Ray itself
    assert re.findall(DRAIN, "\n".join(words)) == re.findall(DRAIN, START.read_text())
    assert read("aws")["worker_start_ray_commands"][1:] == [f"~/lwray/cluster/vm/{WATCH.name}"]
