"""Patterns in other people's code, one test each: sliced correctly, or left alone with a reason."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sliceout
from models import call
from sliceout.nn import factory, mixing
from sliceout.ops import take
from sliceout.takes import Take
from sliceout_lab.oracle import masked_dense_


class Net(nn.Module):
    """Layers named a, b, c, ... and a forward of one's own."""

    def __init__(self, forward, *sizes: tuple[int, int], **more) -> None:
        super().__init__()
        for name, size in zip("abcdef", sizes, strict=False):
            self.add_module(name, nn.Linear(*size))
        for name, value in more.items():
            setattr(self, name, value)
        self.function = forward

    def forward(self, *inputs: Tensor):
        return self.function(self, *inputs)


X = torch.randn(4, 6)


def reasons(report) -> str:
    return " | ".join(f"{r.name}: {r.reason}" for r in report.skipped)


def sliced_layers(report) -> set[str]:
    return {m.module for r in report.rows if r.slice is not None for m in r.group.members}


def convert(net: nn.Module, x=X):
    """Convert and hold the result against the masked network."""
    net = net.double().train()
    full = copy.deepcopy(net)
    x = tuple(t.double() if t.is_floating_point() else t for t in (x if isinstance(x, tuple) else (x,)))
    report = sliceout.convert_(net, 0.5, example_inputs=x)
    for _ in range(3):
        sliceout.draw_(net)
        torch.manual_seed(1)
        expected = call(masked_dense_(copy.deepcopy(full), report), x)
        torch.manual_seed(1)
        torch.testing.assert_close(call(net, x), expected, rtol=1e-10, atol=1e-10)
    return report


def refused(net: nn.Module, *words: str, x=X) -> None:
    """Nothing can be sliced, and the reason says why."""
    with pytest.raises(ValueError, match="nothing to slice") as error:
        sliceout.convert_(net, 0.5, example_inputs=x)
    assert all(word in str(error.value) for word in words), str(error.value)


# -- what is left alone ------------------------------------------------------------------------------------------------


def test_a_residual_stream_is_left_whole_and_its_branches_are_sliced():
    net = Net(lambda m, x: m.d((h := m.a(x)) + m.c(F.relu(m.b(h)))), (6, 16), (16, 32), (32, 16), (16, 3))
    report = convert(net)
    assert sliced_layers(report) == {"b", "c"}
    assert "a: shared by a residual stream" in reasons(report)


def test_concatenated_units_are_left_whole():
    net = Net(lambda m, x: m.c(torch.cat([m.a(x), m.b(x)], 1)), (6, 16), (6, 16), (32, 3))
    refused(net, "concatenated with other units")


def test_tied_weights_are_left_whole():
    net = Net(lambda m, x: m.d(m.c(m.b(m.a(x)).tanh()).tanh()), (6, 32), (32, 32), (32, 32), (32, 3))
    net.c.weight = net.b.weight
    refused(net, "b.weight is shared with c.weight")


def test_softmax_over_units_leaves_them_whole():
    refused(Net(lambda m, x: m.b(m.a(x).softmax(-1)), (6, 32), (32, 3)), "softmax")


def test_a_mean_over_units_leaves_them_whole():
    net = Net(lambda m, x: m.b((h := m.a(x)) - h.mean(-1, keepdim=True)), (6, 32), (32, 3))
    refused(net, "a reduction over the units")


def test_units_used_by_position_are_left_whole():
    net = Net(lambda m, x: m.b(m.a(x)[..., :20]), (6, 32), (20, 3))
    refused(net, "indexing")


def test_a_reshape_that_mixes_units_leaves_them_whole():
    net = Net(lambda m, x: m.b(m.a(x).reshape(4, 5, 6).transpose(1, 2).reshape(6, 20)), (6, 30), (20, 3))
    refused(net, "reshape")


def test_a_raw_parameter_of_the_model_leaves_units_whole():
    net = Net(lambda m, x: m.b(m.a(x) * m.gain), (6, 32), (32, 3), gain=nn.Parameter(torch.ones(32)))
    refused(net, "gain", "has no sliced form")


def test_a_raw_matrix_that_reads_units_leaves_them_whole():
    net = Net(lambda m, x: torch.einsum("bi,ij->bj", m.a(x), m.w), (6, 32), w=nn.Parameter(torch.randn(32, 3)))
    refused(net, "w belongs to Net, which has no sliced form")


def test_an_op_that_is_not_known_leaves_units_whole():
    net = Net(lambda m, x: m.b(torch.fft.fft(m.a(x)).real), (6, 32), (32, 3))
    refused(net, "is not known to keep units apart")


def test_a_constant_that_numbers_the_units_leaves_them_whole():
    """Sliced, the code would add 0, 1, 2, ... to units 9, 10, 11, ..."""

    def forward(m: Net, x: Tensor) -> Tensor:
        h = m.a(x)
        return m.b(torch.tanh(h + torch.arange(h.shape[-1], dtype=h.dtype, device=h.device)))

    refused(Net(forward, (6, 32), (32, 3)), "a constant that numbers its entries")


def test_a_constant_that_is_the_same_for_all_units_does_no_harm():
    def forward(m: Net, x: Tensor) -> Tensor:
        h = m.a(x)
        return m.b(torch.tanh(h + torch.full((h.shape[-1],), 0.3, dtype=h.dtype, device=h.device)))

    assert convert(Net(forward, (6, 32), (32, 3))).converted == 1


def test_a_number_of_units_written_into_the_code_is_told():
    """As a view it would silently put two samples into one; as a split it fails."""
    net = Net(lambda m, x: m.b(torch.tanh(m.a(x)).view(-1, 32)), (6, 32), (32, 3))
    refused(net, "b is not given sliced units", "fixes their number")
    net = Net(lambda m, x: m.b(torch.tanh(m.a(x)).view(4, 32)), (6, 32), (32, 3))
    refused(net, "the model cannot take it", "shape '[4, 32]' is invalid")


def test_outputs_of_the_model_are_left_whole():
    net = Net(lambda m, x: (m.b(h := torch.tanh(m.a(x))), h), (6, 32), (32, 3))
    refused(net, "an output of the model")


def test_an_output_inside_an_object_is_left_whole():
    class Result:
        def __init__(self, hidden: Tensor, y: Tensor) -> None:
            self.hidden, self.y = hidden, y

    net = Net(lambda m, x: Result(h := torch.tanh(m.a(x)), m.b(h)), (6, 32), (32, 3))
    refused(net, "an output of the model")


def test_a_transposed_convolution_is_left_whole():
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.ConvTranspose2d(16, 4, 3))
    refused(net, "2.weight belongs to ConvTranspose2d, which has no sliced form", x=torch.randn(2, 3, 8, 8))


@pytest.mark.parametrize("groups", [1, 4])
def test_a_transposed_convolution_is_sliced_once_there_is_a_sliced_class_for_it(groups, monkeypatch):
    """The trace asks the list of layers: a new one needs no other place."""

    class ConvTranspose2d(mixing.Conv, nn.ConvTranspose2d):
        transposed = True

        def forward(self, x: Tensor) -> Tensor:
            small = self._small_for(x)
            if small is None:
                return super(mixing.Conv, self).forward(x)
            return F.conv_transpose2d(x, small["weight"], small["bias"], groups=self.groups)

        def _small(self, out, into, like):  # rows are inputs, each group has its own columns
            weight = Take(self.axes.get("in") if into else None, out and out.slice.axis(inner=out.inner), bool(into))
            return {"weight": take(self.weight, weight), "bias": take(self.bias, Take(out))}

    monkeypatch.setattr(factory, "_SLICED", (*factory._SLICED, ConvTranspose2d))
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.ConvTranspose2d(16, 32, 3, groups=groups), nn.ReLU(), nn.Conv2d(32, 4, 1)
    )
    report = sliceout.convert_(net, 0.5, example_inputs=torch.randn(2, 3, 8, 8))
    members = [(m.module, m.role, m.blocks) for r in report.rows if r.slice is not None for m in r.group.members]
    assert members == [("0", "out", groups), ("2", "in", groups), ("2", "out", groups), ("4", "in", groups)]
    sliceout.draw_(net)
    assert net(torch.randn(2, 3, 8, 8)).shape == (2, 4, 8, 8)


@pytest.mark.parametrize(("first", "second"), [(4, 8), (8, 4)])
def test_groups_of_channels_that_cut_each_other_are_left_whole(first, second):
    net = nn.Sequential(
        nn.Conv2d(3, 16, 1), nn.Conv2d(16, 32, 1, groups=first), nn.Conv2d(32, 32, 1, groups=second),
        nn.Conv2d(32, 4, 1),
    )  # fmt: skip
    report = convert(net, torch.randn(2, 3, 4, 4))
    layer = "1" if first < second else "2"
    assert f"1: {layer} has groups of channels that lie across these units" in reasons(report)


def in_place(change) -> Net:
    def forward(m: Net, x: Tensor) -> Tensor:
        h = torch.tanh(m.a(x))
        change(h, torch.tensor([0, 3], device=h.device))
        return m.b(h)

    return Net(forward, (6, 32), (32, 3))


@pytest.mark.parametrize(
    "change",
    [
        lambda h, i: h.index_fill_(1, i, 0.0),
        lambda h, i: h.scatter_(1, i.expand(4, 2), 0.0),
        lambda h, i: h.scatter_add_(1, i.expand(4, 2), torch.ones(4, 2, device=h.device, dtype=h.dtype)),
    ],
)
def test_units_changed_in_place_by_position_are_left_whole(change):
    refused(in_place(change), "used by position (indexing)")


@pytest.mark.parametrize("change", [lambda h, i: h.unsqueeze_(1).squeeze_(1), lambda h, i: h.unsqueeze_(0).squeeze_()])
def test_dimensions_of_size_1_come_and_go_in_place(change):
    assert sliced_layers(convert(in_place(change))) == {"a", "b"}


# -- what is sliced ----------------------------------------------------------------------------------------------------


def test_branches_side_by_side_share_their_units():
    net = Net(lambda m, x: m.c(F.relu(m.a(x) + m.b(x))), (6, 32), (6, 32), (32, 3))
    assert sliced_layers(convert(net)) == {"a", "b", "c"}


def test_one_hidden_layer_may_have_several_readers():
    net = Net(lambda m, x: m.b(h := torch.tanh(m.a(x))) + m.c(h), (6, 32), (32, 3), (32, 3))
    assert sliced_layers(convert(net)) == {"a", "b", "c"}


def test_a_module_that_is_called_twice():
    net = Net(lambda m, x: m.c(torch.tanh(m.b(torch.tanh(m.b(torch.tanh(m.a(x))))))), (6, 32), (32, 32), (32, 3))
    report = convert(net)
    assert sliced_layers(report) == {"a", "b", "c"}
    assert net.b.axes["in"].slice is net.b.axes["out"].slice


def test_a_whole_submodule_that_is_called_twice():
    inner = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 6))
    net = Net(lambda m, x: m.head(m.inner(m.inner(x))), inner=inner, head=nn.Linear(6, 2))
    assert {"inner.0", "inner.2"} <= sliced_layers(convert(net))


def test_two_inputs_and_a_dict_of_outputs():
    net = Net(lambda m, x, y: {"out": m.c(F.relu(m.a(x) * m.b(y)))}, (6, 32), (5, 32), (32, 3))
    assert sliced_layers(convert(net, (X, torch.randn(4, 5)))) == {"a", "b", "c"}


def test_control_flow_that_depends_on_data():
    def forward(m: Net, x: Tensor) -> Tensor:
        h = torch.relu(m.a(x))
        if bool((x > 1e9).all()):
            h = h * 2
        return m.b(h)

    assert sliceout.convert_(Net(forward, (6, 32), (32, 3)), 0.5, example_inputs=X).converted == 1


def test_functional_dropout_passes():
    net = Net(lambda m, x: m.b(F.dropout(m.a(x), 0.0, m.training)), (6, 32), (32, 3))
    assert convert(net).converted == 1


def test_channels_behind_a_flatten():
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, 5))
    report = convert(net, torch.randn(2, 3, 8, 8))
    (row,) = [r for r in report.rows if r.slice is not None]
    assert row.slice.size == 16
    assert [(m.blocks, m.inner) for m in row.group.members if m.role == "in"] == [(1, 36)]


def test_nested_modules_are_named_by_their_path():
    inner = nn.Sequential(nn.Sequential(nn.Linear(6, 32), nn.GELU()), nn.Linear(32, 6))
    report = convert(nn.Sequential(inner, nn.Linear(6, 2)))
    assert {"0.0.0", "0.1"} <= sliced_layers(report)


def test_a_norm_of_somebody_elses_making():
    class RootMeanSquare(nn.Module):
        def __init__(self, n: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(n) + 0.5)

        def forward(self, x: Tensor) -> Tensor:
            return x / (1 + x.abs()) * self.weight

    net = nn.Sequential(nn.Linear(6, 32), RootMeanSquare(32), nn.Linear(32, 3))
    assert sliced_layers(convert(net)) == {"0", "1", "2"}


def test_a_linear_layer_behind_a_recurrent_one_is_sliced() -> None:
    """Its input is transposed, so torch adds the bias apart from the product: that is no residual connection."""

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.lstm = nn.Embedding(50, 16), nn.LSTM(16, 32, batch_first=True)
            self.hidden, self.head = nn.Linear(32, 64), nn.Linear(64, 50)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.hidden(self.lstm(self.embed(x))[0]).relu())

    report = sliceout.convert_(Tagger(), 0.5)
    assert [r.name for r in report.rows if r.slice is not None] == ["hidden"]
