"""Text, model and learning-rate schedule of the task ``text``: a small language model of Python's own source.

Purpose: a real language model that every machine can train, with nothing to download. Method: the text is the source
of a fixed list of modules that every Python has had in this form since 3.10, joined in the order of their names; its
first 95 % are trained on, its last 5 % held out. Windows of 65 bytes lie evenly over each part: the first 64 are the
input, the last 64 the targets. The model is a GPT with pre-normalisation over bytes (no tokenizer), whose input and
output embedding are one tensor.

The modules differ between Python versions, so losses compare within one version only; ``Text.source`` says which text
it was, with a hash.

Not here: the task itself (tasks.py), its training (trainer.py), other attentions (attention.py). Weights are drawn as
in GPT-2 without its smaller start of the residual projections, which two layers do not need.

Source of the model: A. Radford et al., Language Models are Unsupervised Multitask Learners, 2019, section 2.3; of the
shared embedding: O. Press and L. Wolf, Using the Output Embedding to Improve Language Models, EACL 2017.
"""

from __future__ import annotations

import hashlib
import math
import platform
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from halfstep.compare.words import words_in
from halfstep.errors import UnsupportedError

NUM_BYTES = 256  # the vocabulary: every value of a byte
CONTEXT = 64  # bytes that the model sees at once
HELD_OUT_SHARE = 0.05
NUM_WARMUP_STEPS = 50

# Public modules of at least 15 KB that are one file in Python 3.10 to 3.13. Left out: site (distributions patch it),
# turtle (it needs Tk), locale (a table of names), profile, pstats and warnings (later versions move them).
_NAMES = """
    argparse ast base64 bdb calendar codecs compileall configparser contextlib csv dataclasses difflib dis doctest enum
    fileinput fractions ftplib functools gettext gzip heapq imaplib inspect ipaddress mailbox mimetypes modulefinder
    ntpath optparse os pdb pickle pickletools pkgutil platform plistlib posixpath pprint pydoc random selectors shutil
    smtplib socket socketserver ssl statistics subprocess tarfile tempfile textwrap threading tokenize trace traceback
    tracemalloc typing uuid wave weakref webbrowser zipimport
"""
MODULES = tuple(_NAMES.split())


# ---- the text -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """What is read and what is held back.

    Args:
        train: the first 95 % of the bytes.
        held_out: the rest.
    """

    train: bytes
    held_out: bytes

    @property
    def sha256(self) -> str:
        """Hash of the whole text, 64 hexadecimal digits."""
        return hashlib.sha256(self.train + self.held_out).hexdigest()

    @property
    def facts(self) -> dict[str, str]:
        """Which text this is: number of modules, Python, megabytes, and the first 16 digits of its hash."""
        return {
            "modules": str(len(MODULES)),
            "python": f"{platform.python_implementation()} {platform.python_version()}",
            "megabytes": f"{(len(self.train) + len(self.held_out)) / 1e6:.2f}",
            "sha256": self.sha256[:16],
        }

    @property
    def source(self) -> str:
        """The same in one line of English."""
        return words_in("en")("source.stdlib", **self.facts)


@lru_cache(maxsize=1)
def library_text() -> Text:
    """The source of `MODULES` in the running Python, read from its standard library's folder, not imported.

    Returns:
        The text, split.

    Raises:
        UnsupportedError: this Python's standard library is not there as source files.

    Example:
        >>> text = library_text()
        >>> text.train[:57]
        b'# Author: Steven J. Bethard <steven.bethard@gmail.com>.\\n#'
    """
    # Windows installs come with other line ends; the same version is to be the same text everywhere.
    whole = b"".join(path.read_bytes().replace(b"\r\n", b"\n") for path in _module_files())
    num_train = round(len(whole) * (1 - HELD_OUT_SHARE))
    return Text(whole[:num_train], whole[num_train:])


def _module_files() -> list[Path]:
    folder = Path(sysconfig.get_path("stdlib"))
    files = [folder / f"{name}.py" for name in sorted(MODULES)]
    absent = [path.name for path in files if not path.is_file()]
    if absent:
        raise UnsupportedError(
            asked="a language model of the standard library's source text",
            true=f"{len(absent)} of its {len(files)} files are not in {str(folder)!r}, such as {absent[0]}",
            why="the model learns from these files, and nothing is downloaded in their place",
            fix="leave --task text out, or use a Python whose standard library is installed as .py files",
        )
    return files


def windows(text: bytes, num_windows: int) -> tuple[Tensor, Tensor]:
    """Pieces of a text at even distances from its beginning to its end.

    Args:
        text: long enough for windows that do not overlap.
        num_windows: how many; 2 or more.

    Returns:
        Inputs and targets, int64 ``[num_windows, CONTEXT]``; a target is the byte after its input.

    Example:
        >>> inputs, targets = windows(bytes(range(256)), 2)
        >>> inputs[:, 0].tolist(), targets[:, -1].tolist()
        ([0, 191], [64, 255])
    """
    stride = (len(text) - CONTEXT - 1) // (num_windows - 1)
    assert stride > CONTEXT, "windows overlap"
    starts = torch.arange(num_windows) * stride
    values = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    block = values[starts[:, None] + torch.arange(CONTEXT + 1)]  # [windows, CONTEXT + 1]
    return block[:, :-1].contiguous(), block[:, 1:].contiguous()


# ---- the model ------------------------------------------------------------------------------------------------------


Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def causal_attention(query: Tensor, key: Tensor, value: Tensor, _: Tensor) -> Tensor:
    """Each byte attends to itself and those before; all of a window is text."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class ByteGpt(nn.Module):
    """A GPT over bytes: token and position embeddings, blocks, a last normalisation, the token embedding again.

    Args:
        num_layers: blocks.
        width: of the residual stream; a multiple of ``num_heads``.
        num_heads: of each attention.
        context: the most bytes that it is given at once.
        attend: mixes values, from query, key, value ``[batch, heads, time, size]`` and the tokens.

    The residual stream is fp32 under autocast, the logits are in autocast's format.

    Example:
        >>> model = ByteGpt()
        >>> sum(parameter.numel() for parameter in model.parameters())
        254592
        >>> model(torch.zeros(2, CONTEXT, dtype=torch.int64)).shape
        torch.Size([2, 64, 256])
    """

    def __init__(
        self,
        num_layers: int = 2,
        width: int = 96,
        num_heads: int = 4,
        *,
        context: int = CONTEXT,
        attend: Attend = causal_attention,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(NUM_BYTES, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(_Block(width, num_heads, attend) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.apply(_draw_weights)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next byte, [batch, time, NUM_BYTES], of int64 tokens [batch, time]; time up to `context`."""
        stream = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]  # [batch, time, width]
        for block in self.blocks:
            stream = block(stream, tokens)
        return F.linear(self.norm(stream), self.tokens.weight)


class _Block(nn.Module):
    def __init__(self, width: int, num_heads: int, attend: Attend) -> None:
        super().__init__()
        self.num_heads, self.attend = num_heads, attend
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, stream: Tensor, tokens: Tensor) -> Tensor:
        stream = stream + self._mix(self.norm_attention(stream), tokens)
        result: Tensor = stream + self.mlp(self.norm_mlp(stream))
        return result

    def _mix(self, stream: Tensor, tokens: Tensor) -> Tensor:
        batch, time, width = stream.shape
        heads = self.query_key_value(stream).view(batch, time, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [batch, heads, time, width of a head]
        seen = self.attend(query, key, value, tokens)
        mixed: Tensor = self.output(seen.transpose(1, 2).reshape(batch, time, width))
        return mixed


def _draw_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


# ---- errors and learning rate ---------------------------------------------------------------------------------------


def byte_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats per byte, computed in fp32.

    Args:
        logits: [batch, time, NUM_BYTES], of any float dtype.
        targets: int64 [batch, time].

    Returns:
        A scalar, fp32.
    """
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def frequency_loss(train: Tensor, held_out: Tensor) -> float:
    """Cross-entropy of held-out bytes under the frequencies of the training bytes: the best guess without an input.

    Args:
        train: int64 byte values of any shape. Each of the 256 values counts once more than it occurs, so that none is
            impossible (add-one smoothing).
        held_out: the same.

    Returns:
        Nats per byte.

    Example:
        >>> frequency_loss(torch.empty(0, dtype=torch.int64), torch.tensor([7])) == math.log(256)
        True
    """
    counts = train.flatten().bincount(minlength=NUM_BYTES).double() + 1
    return float(-(counts / counts.sum()).log()[held_out].mean())


def warmup_then_cosine(
    optimizer: torch.optim.Optimizer, num_steps: int, *, num_warmup_steps: int = NUM_WARMUP_STEPS
) -> LRScheduler:
    """A learning rate that rises in equal steps to the optimizer's own, then falls to zero along half a cosine.

    Args:
        optimizer: its learning rate is the peak.
        num_steps: optimizer steps of the whole run; the rate would reach zero at the step after the last.
        num_warmup_steps: steps of the rise; the first takes 1/num_warmup_steps of the peak.

    Returns:
        A scheduler to be stepped after every optimizer step.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
        >>> schedule = warmup_then_cosine(optimizer, 600)
        >>> optimizer.param_groups[0]["lr"]
        0.01
    """
    share = partial(_share_of_peak, num_steps=num_steps, num_warmup_steps=num_warmup_steps)
    return LambdaLR(optimizer, share)


def _share_of_peak(step: int, *, num_steps: int, num_warmup_steps: int) -> float:
    if step < num_warmup_steps:
        return (step + 1) / num_warmup_steps
    progress = (step - num_warmup_steps) / max(num_steps - num_warmup_steps, 1)
    return 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
