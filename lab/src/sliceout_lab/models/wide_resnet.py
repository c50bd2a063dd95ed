"""Wide ResNet (Zagoruyko & Komodakis, 2016) for 32x32 images, with the paper's dropout between the two convolutions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sliceout.slices import width_of


class WideBlock(nn.Module):
    """BN-ReLU-conv3x3-BN-ReLU-dropout-conv3x3 beside a shortcut; ``hidden`` channels lie between the convolutions."""

    def __init__(self, inputs: int, outputs: int, stride: int, dropout: float, hidden: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, hidden, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(hidden)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(hidden, outputs, 3, padding=1, bias=False)
        same = inputs == outputs and stride == 1
        self.shortcut = None if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(x))
        identity = x if self.shortcut is None else self.shortcut(y)
        y = F.relu(self.bn2(self.conv1(y)))
        return identity + self.conv2(self.dropout(y))


class WideResNet(nn.Module):
    """WRN-``depth``-``width``.

    Args:
        depth: number of convolutional layers, ``6 n + 4``.
        width: how many times wider than the original ResNet.
        classes: number of outputs.
        dropout: rate of the dropout inside every block.
        keep: fraction of the channels between the two convolutions of every block: below 1, this is the plain
            network that SliceOut computes at each step, the floor for its time and memory.

    Example:
        >>> round(sum(p.numel() for p in WideResNet(28, 10).parameters()) / 1e6, 1)
        36.5
    """

    def __init__(self, depth: int, width: int, classes: int = 10, dropout: float = 0.0, keep: float = 1.0) -> None:
        super().__init__()
        if depth < 10 or (depth - 4) % 6:
            raise ValueError(f"depth={depth}: expected 6 n + 4, such as 16, 28 or 40")
        if width < 1:
            raise ValueError(f"width={width}: expected at least 1")
        if not 0 < keep <= 1:
            raise ValueError(f"keep={keep}: expected 0 < keep <= 1")
        self.conv = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.groups = nn.ModuleList()
        channels = 16
        for group in range(3):
            outputs, blocks = 16 * width * 2**group, nn.Sequential()
            for i in range((depth - 4) // 6):
                stride = 2 if group > 0 and i == 0 else 1
                hidden, _ = width_of(outputs, 1 - keep, None)  # as convert_ rounds
                blocks.append(WideBlock(channels, outputs, stride, dropout, hidden))
                channels = outputs
            self.groups.append(blocks)
        self.bn = nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, classes)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out")
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        for blocks in self.groups:
            x = blocks(x)
        x = F.relu(self.bn(x))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))
