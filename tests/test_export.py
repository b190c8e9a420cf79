"""`lwray export`: what transformers, peft and safetensors load is the run's own network; and what is refused."""

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from door import Door, contents, copy_of_trained, fresh_door, own_process, process_as_it_was  # noqa: F401
from safetensors.torch import load_file, load_model
from torch import Tensor

from lwray.checkpoint.find import committed
from lwray.checkpoint.read import Reader
from lwray.cli import main
from lwray.config import Config, load
from lwray.data.prepared import Prepared, open_prepared
from lwray.data.rows import TokenWindows
from lwray.data.tokenizer import load_tokenizer
from lwray.errors import ExitCode
from lwray.models.transformer import Transformer
from lwray.store import open_store
from lwray.tasks.lm import shape_of

TASKS = Path(__file__).parent / "tasks"
ODD_TEXTS = [
    "alpha beta\ngamma  \n\n  delta ",
    "🙂 Größe, 東京, e\u0301 ÿ",
    "\ttabs\r\n\x00",
    "don't , stop .",
    "<|endoftext|> is only text",
    "",
]
CLASSES = {
    "LlamaForCausalLM": ["model.kv_heads=1", "model.rope_theta=2e4"],
    "Qwen3ForCausalLM": ["model.qk_norm=true", "model.tied=false", "data.tokenizer=bpe", "data.vocab_size=300"],
    "ArceeForCausalLM": ["model.activation=relu2", "model.dropout=0.2"],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the run `tiny`, whose lr is so large that its best evaluation is not its last."""
    door = Door(tmp_path_factory.mktemp("door")).write()
    steps = ["eval.every_steps=2", "checkpoint.every_steps=2", "checkpoint.asynchronous=false", "checkpoint.keep=9"]
    with process_as_it_was():
        assert door.train(*steps, "optim.lr=0.3", "optim.schedule=constant") == ExitCode.FINISHED
    return door.root


def run_of(door: Door) -> Path:
    return door.storage / "tiny"


def export(door: Door, *arguments: str) -> int:
    """The exit code of `lwray export`, into the directory `out`."""
    return main(["export", str(run_of(door)), "--out", str(door.root / "out"), *arguments])


def record(door: Door) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((door.root / "out/export.json").read_text())
    return found


def checkpoint(door: Door, step: int | None = None) -> Reader:
    store = open_store(str(run_of(door) / "checkpoints"))
    return Reader(store, next(name for name, manifest in committed(store) if step in (None, manifest.step)))


def config_of(door: Door) -> Config:
    return load(run_of(door) / "attempts/0001/config.toml").config


def prepared_of(door: Door) -> Prepared:
    [directory] = (door.storage / ".data").iterdir()
    return open_prepared(directory)


def own_network(door: Door, step: int | None = None) -> Transformer:
    """The run's decoder, filled from the checkpoint without any of what `export` does."""
    model = Transformer(shape_of(config_of(door), prepared_of(door).vocab_size)).eval()
    reader = checkpoint(door, step)
    model.load_state_dict({name: reader.whole(f"param/{name}") for name in reader.keys("param")})
    return model


def logits_of(directory: Path, tokens: Tensor) -> Tensor:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(report.values())
    with torch.no_grad():
        found: Tensor = model(tokens).logits
    return found


# the lm task


@pytest.mark.parametrize("name", CLASSES)
def test_transformers_computes_the_logits_of_the_run(name: str, fresh: Door) -> None:
    assert fresh.train(*CLASSES[name], "optim.lr=3e-2", "model.layers=2", "train.steps=8") == ExitCode.FINISHED
    assert export(fresh) == ExitCode.FINISHED
    prepared, context = prepared_of(fresh), config_of(fresh).model.context
    held_out = TokenWindows(prepared.val, context)
    batch = held_out.fetch(np.arange(len(held_out)))
    with torch.no_grad():
        own = own_network(fresh)(batch["tokens"])
    # it is the network that the run evaluated at its end
    loss = F.cross_entropy(own.flatten(0, 1), batch["targets"].flatten()).item()
    assert record(fresh)["val_loss"] == pytest.approx(loss, abs=1e-5)
    assert record(fresh)["class"] == name
    logits = logits_of(fresh.root / "out", batch["tokens"])
    assert logits.shape[-1] == prepared.vocab_size
    torch.testing.assert_close(logits, own[..., : prepared.vocab_size], rtol=0, atol=1e-5)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_the_tokenizer_gives_the_ids_that_the_run_was_trained_on(tokenizer: str, fresh: Door) -> None:
    from transformers import AutoConfig, AutoTokenizer

    # a file with a zero byte is no text to train on
    odd_text = "".join(ODD_TEXTS).replace("\x00", "") * 20
    fresh.text.write_text(odd_text + fresh.text.read_text())
    assert fresh.train(f"data.tokenizer={tokenizer}", "train.steps=1") == ExitCode.FINISHED
    assert export(fresh) == ExitCode.FINISHED
    path = prepared_of(fresh).tokenizer
    assert path is not None
    ours, theirs = load_tokenizer(path), AutoTokenizer.from_pretrained(fresh.root / "out")
    for odd in ODD_TEXTS:
        ids = theirs(odd)["input_ids"]
        assert ids == ours.encode_batch([odd])[0].tolist()
        assert theirs.decode(ids) == odd
    assert len(theirs) == ours.vocab_size
    assert theirs.model_max_length == 32
    config = AutoConfig.from_pretrained(fresh.root / "out")
    assert theirs.eos_token_id == config.eos_token_id == ours.eot
    assert config.bos_token_id is None


def test_the_directory_generates(door: Door) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert export(door) == ExitCode.FINISHED
    model, tokenizer = (each.from_pretrained(door.root / "out") for each in (AutoModelForCausalLM, AutoTokenizer))
    prompt = tokenizer("alpha ", return_tensors="pt")
    longer = model.generate(**prompt, max_new_tokens=4, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    assert prompt["input_ids"].shape[1] < longer.shape[1] <= prompt["input_ids"].shape[1] + 4


def test_a_run_on_token_ids_has_no_tokenizer_and_says_so(fresh: Door, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(fresh.root / "ids.npy", (np.arange(4000) % 300).astype(np.uint16))
    given = [f"data.source={fresh.root / 'ids.npy'}", "data.vocab_size=300", "eval.baseline=false"]
    assert fresh.train(*given) == ExitCode.FINISHED
    assert export(fresh) == ExitCode.FINISHED
    assert "It has no tokenizer: the run was given token ids." in capsys.readouterr().out
    assert record(fresh)["tokenizer"] is False
    assert sorted(contents(fresh.root / "out")) == ["config.json", "export.json", "model.safetensors"]


def test_a_model_that_no_class_computes_is_refused(fresh: Door, capsys: pytest.CaptureFixture[str]) -> None:
    odd = ["model.activation=relu2", "model.qk_norm=true"]
    sentence = "No class of transformers has model.activation = 'relu2' together with model.qk_norm = true"
    assert fresh.train(*odd, "checkpoint.exportable=true") == ExitCode.BAD_INPUT
    assert sentence in capsys.readouterr().err
    assert not run_of(fresh).exists()
    assert fresh.train(*odd) == ExitCode.FINISHED
    assert export(fresh) == ExitCode.BAD_INPUT
    assert sentence in capsys.readouterr().err
    assert not (fresh.root / "out").exists()


def test_an_exportable_model_is_trained(fresh: Door) -> None:
    assert fresh.train("checkpoint.exportable=true") == ExitCode.FINISHED
    resolved = tomllib.loads((run_of(fresh) / "attempts/0001/config.toml").read_text())
    assert resolved["checkpoint"]["exportable"] is True


# which state


def evaluations(door: Door) -> dict[int, float]:
    """Validation loss by the number of updates before it."""
    lines = [json.loads(line) for line in (run_of(door) / "attempts/0001/metrics.jsonl").read_text().splitlines()]
    return {line["step"] + 1: line["val_loss"] for line in lines if "val_loss" in line}


def test_the_newest_the_best_and_a_given_step_are_written(door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    losses = evaluations(door)
    best = min(losses, key=lambda step: losses[step])
    assert best != max(losses)
    capsys.readouterr()
    for arguments, step in ((["--best"], best), (["--step", "4"], 4), ([], 6)):
        assert export(door, *arguments) == ExitCode.FINISHED
        assert (record(door)["run"], record(door)["step"], record(door)["attempt"]) == ("tiny", step, 1)
        assert record(door)["val_loss"] == pytest.approx(losses[step])
        stored = load_file(door.root / "out/model.safetensors")["model.embed_tokens.weight"]
        assert torch.equal(stored, own_network(door, step).embedding.weight[:257])
        said = f"{door.root / 'out'}: tiny after {step} steps (validation loss {losses[step]:.4f}), a LlamaForCausalLM."
        assert said in capsys.readouterr().out
        shutil.rmtree(door.root / "out")


def test_a_step_that_is_not_there_is_refused_with_those_that_are(
    door: Door, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(door, "--step", "5") == ExitCode.BAD_INPUT
    assert "there is no checkpoint of step 5; there are those of 6, 4, 2" in capsys.readouterr().err


def test_a_step_and_the_best_are_not_asked_for_together(door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        export(door, "--step", "4", "--best")
    assert ended.value.code == ExitCode.BAD_INPUT
    assert "not allowed with" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_refused_and_nothing_is_left(door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    newest = checkpoint(door)
    file = run_of(door) / "checkpoints" / newest.name / next(iter(newest.manifest.files))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    before = sorted(path.name for path in door.root.iterdir())
    assert export(door) == ExitCode.BAD_INPUT
    assert f"tiny cannot be exported: {newest.name} is damaged" in capsys.readouterr().err
    assert sorted(path.name for path in door.root.iterdir()) == before
    assert export(door, "--step", "4") == ExitCode.FINISHED


def test_a_run_without_a_checkpoint_and_no_run_are_refused(door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(run_of(door) / "checkpoints")
    assert export(door) == ExitCode.BAD_INPUT
    assert "tiny cannot be exported: there is no checkpoint yet." in capsys.readouterr().err
    assert main(["export", str(door.storage / "tinny"), "--out", str(door.root / "out")]) == ExitCode.BAD_INPUT
    assert "There is no run" in capsys.readouterr().err


# where to, and from what


def test_a_directory_in_use_is_left_alone_and_an_empty_one_taken(
    door: Door, capsys: pytest.CaptureFixture[str]
) -> None:
    out = door.root / "out"
    out.mkdir()
    assert export(door) == ExitCode.FINISHED
    before = contents(out)
    assert export(door, "--step", "2") == ExitCode.BAD_INPUT
    assert f"{out} exists and is not an empty directory" in capsys.readouterr().err
    assert contents(out) == before
    shutil.rmtree(out)
    out.write_text("a file")
    assert export(door) == ExitCode.BAD_INPUT


def test_a_place_that_cannot_be_written_is_refused(door: Door, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run_of(door)), "--out", str(door.text / "out")]) == ExitCode.BAD_INPUT
    assert "cannot be written: Not a directory" in capsys.readouterr().err


def test_the_source_may_be_gone_or_the_prepared_text_but_not_both(
    door: Door, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # the run knows its source by the path that it was trained from
    source = trained / "text.txt"
    text = source.read_bytes()
    source.unlink()
    try:
        assert export(door) == ExitCode.FINISHED
        shutil.rmtree(door.root / "out")
        shutil.rmtree(door.storage / ".data")
        assert export(door) == ExitCode.BAD_INPUT
        assert str(source) in capsys.readouterr().err
        source.write_bytes(text[: len(text) // 2])
        assert export(door) == ExitCode.BAD_INPUT
        assert "The data of tiny has changed since the run started" in capsys.readouterr().err
    finally:
        source.write_bytes(text)
    shutil.rmtree(door.storage / ".data")
    assert export(door) == ExitCode.FINISHED


# tasks of one's own

# peft 0.21 asks transformers 5 for an attribute by its old name
old_name_in_peft = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


def own_task(fresh: Door, file: str, name: str, *arguments: str) -> Path:
    """A trained run of a task of the user's, whose own file is gone afterwards; the attempt's copy of it."""
    path = Path(shutil.copy(TASKS / file, fresh.root))
    assert fresh.train(f"task.name={path}:{name}", *arguments) == ExitCode.FINISHED
    path.unlink()
    return run_of(fresh) / "attempts/0001" / file


def test_a_network_of_ones_own_is_one_file_under_its_plain_names(fresh: Door) -> None:
    own_task(fresh, "toy.py", "Toy")
    assert export(fresh) == ExitCode.FINISHED
    assert sorted(contents(fresh.root / "out")) == ["export.json", "model.safetensors"]
    assert record(fresh)["class"] == "Sequential"
    network = torch.nn.Sequential(
        torch.nn.Linear(8, 31),
        torch.nn.Tanh(),
        torch.nn.Dropout(),
        torch.nn.Linear(31, 7),
        torch.nn.Tanh(),
        torch.nn.Linear(7, 2),
    )
    load_model(network, str(fresh.root / "out/model.safetensors"))
    reader = checkpoint(fresh)
    assert all(torch.equal(p, reader.whole(f"param/{name}")) for name, p in network.named_parameters())


def test_parameters_that_were_never_trained_are_written_with_their_first_values(fresh: Door) -> None:
    source = (TASKS / "toy.py").read_text().replace("        return nn.Sequential(", "        return Spare(")
    (fresh.root / "spare.py").write_text(
        source
        + "\n\nclass Spare(nn.Sequential):\n"
        + "    def __init__(self, *layers: nn.Module) -> None:\n"
        + "        super().__init__(*layers)\n"
        + "        self.spare = nn.Parameter(torch.full((3,), 2.5))\n"
        + "        self.register_buffer('seen', torch.ones(2))\n\n"
        + "    def forward(self, x: Tensor) -> Tensor:\n"
        + "        for name, layer in self._modules.items():\n"
        + "            x = layer(x)\n"
        + "        return x\n"
    )
    assert fresh.train(f"task.name={fresh.root / 'spare.py'}:Toy") == ExitCode.FINISHED
    assert "spare" not in checkpoint(fresh).keys("param")
    assert export(fresh) == ExitCode.FINISHED
    stored = load_file(fresh.root / "out/model.safetensors")
    assert stored["spare"].tolist() == [2.5] * 3
    assert stored["seen"].tolist() == [1.0, 1.0]


@old_name_in_peft
def test_adapters_come_out_in_the_layout_of_peft(fresh: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft import PeftModel

    monkeypatch.syspath_prepend(TASKS)
    from adapted import base_model

    own_task(fresh, "adapted.py", "Adapted", "optim.lr=0.05")
    assert export(fresh) == ExitCode.FINISHED
    assert {"adapter_config.json", "adapter_model.safetensors"} <= contents(fresh.root / "out").keys()
    assert record(fresh)["class"] == "PeftModel"
    tokens = torch.arange(12).view(2, 6)
    with torch.no_grad():
        plain = base_model()(tokens).logits
        adapted = PeftModel.from_pretrained(base_model(), fresh.root / "out")
        logits = adapted(tokens).logits
        reader = checkpoint(fresh)
        for name, parameter in adapted.named_parameters():
            if "lora" in name:
                assert torch.equal(parameter, reader.whole(f"param/{name}"))
    assert (logits - plain).abs().max() > 1e-3


def test_a_network_of_transformers_writes_its_own_layout(fresh: Door) -> None:
    own_task(fresh, "adapted.py", "Adapted", "task.options.adapters=false", "optim.lr=0.05")
    assert export(fresh) == ExitCode.FINISHED
    assert record(fresh)["class"] == "LlamaForCausalLM"
    stored = load_file(fresh.root / "out/model.safetensors")
    reader = checkpoint(fresh)
    assert stored.keys() == set(reader.keys("param"))
    assert all(torch.equal(tensor, reader.whole(f"param/{name}")) for name, tensor in stored.items())
    tokens = torch.arange(12).view(2, 6)
    assert logits_of(fresh.root / "out", tokens).shape == (2, 6, 64)


@old_name_in_peft
def test_a_base_that_is_not_the_one_trained_on_is_refused(fresh: Door, capsys: pytest.CaptureFixture[str]) -> None:
    copy = own_task(fresh, "adapted.py", "Adapted")
    copy.write_text(copy.read_text().replace("BASE_SEED = 11", "BASE_SEED = 12"))
    assert export(fresh) == ExitCode.FAILED
    assert "frozen weights" in capsys.readouterr().err
    assert not (fresh.root / "out").exists()


def test_an_export_that_fails_leaves_nothing(fresh: Door) -> None:
    copy = own_task(fresh, "toy.py", "Toy")
    failing = "\n    def export(self, model: nn.Module, directory: Any) -> None:\n"
    failing += "        (directory / 'half').write_text('')\n        raise ValueError('half done')\n"
    copy.write_text(copy.read_text() + failing)
    before = sorted(path.name for path in fresh.root.iterdir())
    with pytest.raises(ValueError, match="half done"):
        export(fresh)
    assert sorted(path.name for path in fresh.root.iterdir()) == before


def test_a_run_that_lost_its_copy_of_the_task_is_refused(fresh: Door, capsys: pytest.CaptureFixture[str]) -> None:
    own_task(fresh, "toy.py", "Toy").unlink()
    assert export(fresh) == ExitCode.BAD_INPUT
    assert "toy.py, is gone: put toy.py back there" in capsys.readouterr().err
