"""Random programs in grad mode, compiled beside eager: writes, views, dropout, regions without gradients, several results of which some are used.

trained.py [--n N] [--seed S] [--length L] [--print]
"""
from __future__ import annotations

import contextlib
import functools
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent / "ops")]
import graphs  # noqa: E402
import opinfo_grad  # noqa: E402


def without_gradients(line):
    name, value = line.split(" = ", 1)
    return f"with torch.no_grad(): {name} = ({value}).clone()"


class Program(graphs.Program):
    """A random program whose float inputs need gradients. It writes to copies of them: eager refuses to write to a leaf."""

    def __init__(self, seed, length):
        super().__init__(seed, length)
        choose = self.random
        for t in self.inputs:
            if t.is_floating_point() and choose.random() < 0.8:
                t.requires_grad_()
        lines = []
        for line in self.lines:
            lines.append(line)
            name = line.split(" = ")[0]
            if not name.startswith("v") or not name.isidentifier() or " = " not in line:
                continue
            roll = choose.random()
            if roll < 0.06:
                lines.append(f"{name} = torch.nn.functional.dropout({name}.to(torch.get_default_dtype()), {choose.choice([0.0, 0.2, 0.5])})")
            elif roll < 0.10:
                lines.append(f"{name} = {name}.detach()")
            elif roll < 0.14:
                # a copy: whether a view made without gradients needs them depends in eager on who asks first
                lines[-1] = without_gradients(line)
                for about in (self.rounded, self.inner):
                    if line in about:
                        about[lines[-1]] = about.pop(line)
                if lines[-1] in self.inner:
                    self.inner[lines[-1]] = without_gradients(self.inner[lines[-1]])
        self.lines = [f"x{i} = x{i}.clone()" for i in range(len(self.inputs)) if choose.random() < 0.9 or any(f"x{i}" in line for line in lines)] + lines
        self.fraction = choose.choice([None, None, 0.5])

    def used(self, count):
        """Through which of the results that have one the gradient comes."""
        if self.fraction is None or count < 2:
            return range(count)
        return [i for i in range(count) if (self.seed + i) % 2] or [0]

    def function(self, wide=False, jolts=0):
        from compare import Jolts
        return opinfo_grad.with_gradient(super().function(wide, jolts), self.used, (lambda: Jolts(jolts)) if jolts else contextlib.nullcontext)

    def plain(self):
        return super().function()


OTHER_VALUES = [torch.zeros_like, torch.ones_like, torch.rand_like, lambda t: -torch.rand_like(t), torch.randn_like]


def check(program) -> str:
    """"ok", "open", "inconclusive", "raises" (as eager does) or "eager" (it was not compiled: nothing was compared); raises compare.Mismatch."""
    import vitrify
    from compare import attempt, copied, flat, tensors_of

    @functools.cache
    def strides_with(value):
        """Of eager's results and gradients where the inputs have other values."""
        sample = copied(program.sample)
        with torch.no_grad():
            for _, t in tensors_of(sample):
                if t.is_floating_point():
                    t.copy_(value(t))
        made, error = attempt(opinfo_grad.with_gradient(program.plain(), program.used), *sample)
        return [] if error else [isinstance(t, torch.Tensor) and t.stride() for _, t in flat(made)]

    def open_strides(i, ours, eager):
        # Which order gradients are added in decides strides in eager, and of prod's whether a factor is zero. torch's own rule for gradients leaves strides of
        # one element out: torch/csrc/autograd/utils/grad_layout_contract.h. Of .grad it makes the parameter's strides, whatever these are.
        if all(n == 1 or p == q for n, p, q in zip(ours.shape, ours.stride(), eager.stride())):
            return True
        if ".prod(" not in program.source:
            return False
        return any(known[i:i + 1] == [ours.stride()] for known in map(strides_with, OTHER_VALUES))
    try:
        mixed = any(op in program.source for op in ("_norm(", "softmax(", "logsumexp(", ".mean(", ".var(", ".std("))
        did = opinfo_grad.compare(program.plain(), program.sample, True, graphs.reference_of(program), "mixed" if mixed else True, program.used,
                                  open_strides=open_strides)
        if attempt(program.function(), *copied(program.sample))[1] is not None:
            return "raises"
        if did["unclear"]:
            return "inconclusive"
        return "eager" if did.get("fallbacks") or did.get("eager_calls") else "open" if did.get("open") else "ok"
    finally:
        vitrify.reset()


def main(argv=None):
    return graphs.run_programs(check, Program, graphs.KINDS | {"raises": "raise as eager does", "open": "as eager but for strides of a gradient that torch leaves open"}, argv, description=__doc__)


if __name__ == "__main__":
    raise SystemExit(main())
