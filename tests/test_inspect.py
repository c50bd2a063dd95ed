"""``sliceout inspect``: what convert_ would do to a model that is only named."""

from __future__ import annotations

import json

import pytest

from sliceout.cli import app as cli


def inspect(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["inspect", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_report_of_efficientnet_b0_fits_on_a_screen(capsys) -> None:
    pytest.importorskip("timm")
    code, out, _ = inspect(capsys, "timm:efficientnet_b0")
    lines = out.splitlines()
    assert code == 0
    assert "15 groups" in lines[0]
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 160


@pytest.mark.parametrize(
    ("spec", "layer"),
    [("hf:gpt2", "mlp.c_fc"), ("torchvision:resnet18", "layer1.*.conv1"), ("torch.nn:Transformer", "linear1")],
)
def test_models_are_found_by_name(spec: str, layer: str, capsys) -> None:
    pytest.importorskip({"hf": "transformers"}.get(spec.partition(":")[0], "torchvision"))
    code, out, err = inspect(capsys, spec)
    if spec == "torch.nn:Transformer":  # takes two inputs, which nobody can guess
        assert code == 1
        assert "example_inputs" in err
    else:
        assert code == 0
        assert layer in out


def test_a_factory_in_the_current_folder_is_found(tmp_path, monkeypatch, capsys) -> None:
    net = "def net(): return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))"
    (tmp_path / "own_model.py").write_text(f"from torch import nn\n{net}\nnumber = int\n")
    monkeypatch.chdir(tmp_path)
    code, out, _ = inspect(capsys, "own_model:net", "--rate", "0.25", "--json")
    assert code == 0
    assert json.loads(out)["groups"][0]["width"] == 48
    assert inspect(capsys, "own_model:nets")[2] == "sliceout: own_model has no 'nets': did you mean net?\n"
    assert "returned a int, not an nn.Module" in inspect(capsys, "own_model:number")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resnet18"], "expected timm:efficientnet_b0, torchvision:resnet18, hf:gpt2 or package.module:factory"),
        (["timm:efficientnet_b00"], "timm has no model 'efficientnet_b00': did you mean efficientnet_b0"),
        (["torchvision:resnet180"], "did you mean resnet18"),
        (["hf:gtp2"], "did you mean gpt2"),
        (["no_such_package:net"], "there is no module 'no_such_package'"),
        (["torch.nn:ReLU"], "could not run ReLU to see how its layers are connected; pass example_inputs="),
        (["torchvision:resnet18", "--rate", "1.5"], "rate=1.5: expected 0 <= rate < 1"),
        (["torchvision:resnet18", "--attention", "tails"], "attention='tails'"),
    ],
)
def test_what_is_wrong_is_said_without_a_traceback(arguments: list[str], message: str, capsys) -> None:
    for package in ("timm", "torchvision", "transformers"):
        pytest.importorskip(package)
    code, _, err = inspect(capsys, *arguments)
    assert code == 1
    assert err.startswith("sliceout: ")
    assert message in err
    assert "Traceback" not in err


def test_a_factory_may_say_what_its_model_is_called_with(tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "two_inputs.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a, self.b, self.c = (torch.nn.Linear(*n) for n in ((8, 64), (5, 64), (64, 2)))\n"
        "    def forward(self, x, y): return self.c((self.a(x) + self.b(y)).relu())\n"
        "def net(): return Net(), (torch.zeros(3, 8), torch.zeros(3, 5))\n"
        "def bad(): return 1, 2\n"
    )
    monkeypatch.chdir(tmp_path)
    code, out, _ = inspect(capsys, "two_inputs:net")
    assert code == 0
    assert "input: [3, 8], [3, 5]" in " ".join(out.split())
    assert "not an nn.Module or (model, inputs)" in inspect(capsys, "two_inputs:bad")[2]
    assert inspect(capsys, "two_inputs:Net")[0] == 1  # nobody can guess them


def test_weights_are_never_fetched(monkeypatch, capsys) -> None:
    pytest.importorskip("torchvision")
    import torch

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", lambda *a, **k: pytest.fail("weights were fetched"))
    from sliceout.cli.models import find_model

    for spec in ("torchvision:lraspp_mobilenet_v3_large", "torchvision.models.segmentation:fcn_resnet50"):
        assert sum(p.numel() for p in find_model(spec).parameters())


def test_a_narrow_terminal_gets_narrow_lines(monkeypatch, capsys) -> None:
    pytest.importorskip("timm")
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = inspect(capsys, "timm:resnet18")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert "input: [2, 3, 224, 224] (guessed)" in " ".join(out.split())


def test_the_version_is_printed(capsys) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("sliceout ")
