"""A size that is found while a program is captured is taken to be at least two. Where it is one, a chunk has fewer parts than were recorded: what is computed
of now is not known then, and an internal check failed."""
import torch
import vitrify


def program(x):
    counts = torch.unique(torch.unique(x, return_counts=True)[1], return_counts=True)[1]
    half = torch.reciprocal(counts.abs() + 1).chunk(2, 0)[0]
    return torch.relu(half[half != 0]).reshape(-1, 1) * 2, half


def test_chunks_of_found_sizes():
    f = vitrify.compile(program, fullgraph=True)
    for x in (torch.arange(12.0), torch.arange(12.0), torch.tensor([1.0, 1, 2, 3, 3, 3]), torch.arange(5.0)):
        with torch.no_grad():
            for ours, eager in zip(f(x), program(x), strict=True):
                torch.testing.assert_close(ours, eager, rtol=0, atol=0)
