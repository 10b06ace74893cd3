"""Graph networks whose edges are filtered by a mask."""
import pytest
import torch

import vitrify

nn = pytest.importorskip("torch_geometric.nn")
NODES, EDGES = 60, 400


def make(kind):
    torch.manual_seed(0)
    model = nn.GAT(16, 32, 2, 10, heads=4) if kind == "GAT" else nn.GCN(16, 32, 2, 10)
    return model.eval(), torch.randn(NODES, 16), torch.randint(0, NODES, (2, EDGES))


def agree(model, compiled, x, edges):
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, edges), model(x, edges))


@pytest.mark.parametrize("kind", ["GAT", "GCN"])
def test_edges_changed_between_calls(kind):
    model, x, edges = make(kind)
    compiled = vitrify.compile(model, fullgraph=True)
    agree(model, compiled, x, edges)
    before = vitrify.counters["compiled_calls"]
    agree(model, compiled, x, edges)
    edges[:, :50] = 7  # as many self loops
    agree(model, compiled, x, edges)
    edges.numpy()[:] = torch.randint(0, NODES, (2, EDGES)).numpy()  # no version counted
    agree(model, compiled, x, edges)
    assert vitrify.counters["compiled_calls"] == before + 3


@pytest.mark.eager("the content of an argument is not what the plan is for")
@pytest.mark.parametrize("kind", ["GAT", "GCN"])
def test_nothing_left_of_the_edges(kind):
    model, x, edges = make(kind)
    compiled = vitrify.compile(model)
    agree(model, compiled, x, edges)
    edges[1] = edges[0]
    agree(model, compiled, x, edges)
    edges[1] = (edges[0] + 1) % NODES
    before = vitrify.counters["compiled_calls"]
    agree(model, compiled, x, edges)
    assert vitrify.counters["compiled_calls"] == before + 1


@pytest.mark.parametrize("kind", ["GAT", "GCN"])
def test_another_graph_of_another_size(kind):
    model, x, edges = make(kind)
    compiled = vitrify.compile(model)
    agree(model, compiled, x, edges)
    agree(model, compiled, torch.randn(33, 16), torch.randint(0, 33, (2, 90)))
    agree(model, compiled, x, edges)


def test_an_edge_to_nowhere_raises_as_eager_does():
    model, x, edges = make("GAT")
    compiled = vitrify.compile(model)
    agree(model, compiled, x, edges)
    edges[1, 3] = NODES + 5
    with torch.no_grad(), pytest.raises((IndexError, RuntimeError)):
        compiled(x, edges)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 8, 9])
def test_heads(heads):
    torch.manual_seed(0)
    model, x, edges = nn.GATConv(12, 6, heads=heads).eval(), torch.randn(NODES, 12), torch.randint(0, NODES, (2, EDGES))
    agree(model, vitrify.compile(model, fullgraph=True), x, edges)
