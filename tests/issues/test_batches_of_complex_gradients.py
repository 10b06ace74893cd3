"""Batched gradients that are views of the gradients they come by keep their lazy bits and their dtype, and batches that come as conjugates, or lie otherwise, are taken."""
import pytest
import torch
import vitrify
from torch.autograd import grad

BATCH = [[1 + 1j, 2j], [0.5j, 1]]


def of_complex(f):
    def use(run):
        x = torch.tensor([1 + 2j, 3 - 1j], requires_grad=True)
        return grad(run(x), x, torch.tensor(BATCH), is_grads_batched=True)[0]

    return f, use


def twice(run):
    x = torch.tensor([1 + 2j, 3 - 1j], requires_grad=True)
    (q,) = grad(run(x).conj(), x, torch.tensor(BATCH), is_grads_batched=True, create_graph=True)
    return grad(q.abs().sum(), x)[0]


def conjugates(run, n=2):
    x = torch.tensor([1.0, 3.0], requires_grad=True)
    return grad(run(x).conj(), x, torch.tensor(BATCH).repeat(n // 2, 1), is_grads_batched=True)[0]


def as_real(run):
    x = torch.tensor([1 + 2j, 3 - 1j, 1j], requires_grad=True)
    return grad(run(x), x, torch.arange(12.0).view(2, 3, 2), is_grads_batched=True)[0]


def as_complex(run):
    x = torch.arange(6.0).view(3, 2).requires_grad_()
    return grad(run(x), x, torch.arange(6.0).view(2, 3) * (1 + 2j), is_grads_batched=True)[0]


def jacobian(run):
    x = torch.tensor([[1 + 2j, 3 - 1j]], requires_grad=True)
    return torch.autograd.functional.jacobian(lambda x: run(x).imag * 2, x, vectorize=True)


def many(run):
    x = torch.arange(40.0).view(5, 8).requires_grad_()
    return torch.autograd.functional.jacobian(lambda x: torch.stack([run(x), x.flatten()], 1), x, vectorize=True)


PROGRAMS = {
    "conjugate": of_complex(lambda x: x.conj() + 1),
    "conjugate of what is made": of_complex(lambda x: (x * 2).conj()),
    "conjugate of a part": of_complex(lambda x: torch.cat([x[1:].conj(), x[:1]])),
    "adjoint": (lambda x: x.mH + 1, jacobian),
    "as real": (lambda x: torch.view_as_real(x) + 1, as_real),
    "as complex": (lambda x: torch.view_as_complex(x) + 1, as_complex),
    "conjugates, twice": (lambda x: x * x, twice),
    "conjugates": (lambda x: torch.complex(x, x * 2), conjugates),
    "many conjugates": (lambda x: torch.complex(x, x * 2), lambda run: conjugates(run, 80)),
    "many, otherwise laid": (lambda x: x.flatten() + 1, many),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.judged("large batches run op by op")
def test_batches(name, dynamic):
    f, use = PROGRAMS[name]
    eager = use(f)
    compiled = vitrify.compile(f, dynamic=dynamic)
    before = dict(vitrify.counters)
    for _ in range(2):
        ours = use(compiled)
        torch.testing.assert_close(ours, eager)
        assert (ours.is_conj(), ours.is_neg()) == (eager.is_conj(), eager.is_neg())
        if name in ("conjugate", "as real", "as complex", "adjoint"):
            assert ours.stride() == eager.stride()
    assert vitrify.counters["eager_calls"] == before.get("eager_calls", 0)
