"""What random programs in grad mode add: lines that autograd sees, and what is done with the results of a call."""
from __future__ import annotations

from families import floating, lines

TRACED = """
    with torch.no_grad(): {v} = ({a} * 2).clone()                         {a}.detach()                       F.dropout({a}, 0.2)                F.dropout({a}, 0.5)
    checkpoint(lambda t: torch.tanh(t * 2), {a}, use_reentrant=False)      with torch.no_grad(): {v} = checkpoint(torch.sin, {a}, use_reentrant=True)    checkpoint(lambda t, u: torch.sigmoid(t) * u, {a}, {b}, use_reentrant=False)
    checkpoint(lambda t: F.dropout(t, 0.3) * 2, {a}, use_reentrant=False)  customs.Scale.apply({a}, {b})      customs.Pair.apply({a})[0]         customs.Pair.apply({a})[1] + 1
    customs.Straight.apply({a})[0]      {v} = {a} * 1; {v} = customs.Dirty.apply({v})                        torch.ops.fuzz.scaled({a}, 0.5)    torch.autograd.grad({a}.pow(3).sum(), {a}, create_graph=True)[0]
    {v} = {a}.clone(); {v}[0] = 0
    {v} = {a}.clone(); {v}.add_({b})    {v} = {a}.clone(); {v}.mul_({b}); {v} = {v}.sin()                    {v} = {a}.exp(); {v} = {v} * {v}   {v} = {a}.clone(); {v}.requires_grad_(True)
    with torch.enable_grad(): {v} = {a} * {a}                              {v} = {a}.sin(); {v}.detach().mul_(2)                                 F.rrelu({a}, training=True)        F.glu({a}.repeat_interleave(2, 0), 0)
    {a}.expand(2, *{a}.shape).prod(0)   torch.where({a} > 0, {a}.sqrt(), {a} * 0)                            {a}.clone().requires_grad_(False)  {a}.unfold(0, 2, 1).mean(-1)
"""
HOOKED = "{a}.register_hook(lambda g: g * 2)    {v} = {a} * 2; {v}.retain_grad()    {v} = {a} + 0; {v}.register_hook(lambda g: g.clamp(-1, 1))"
CHECKPOINTED = [("nn.Linear({n}, {n})", "checkpoint({m}, {a}, use_reentrant=False)"), ("nn.Sequential(nn.Linear({n}, 8), nn.GELU(), nn.Linear(8, {n}))", "{a} + checkpoint({m}, {a}, use_reentrant=False)"),
                ("nn.LayerNorm({n})", "checkpoint(lambda t: F.gelu({m}(t)), {a}, use_reentrant=False)")]
FAMILIES = {"traced": (lines(TRACED), floating), "hooked": (lines(HOOKED), floating), "checkpointed": (CHECKPOINTED, floating)}

# What is done with f, net and args, to give `out` and `told`. heads: the results that have gradients; weighed: their weighted sum.
DRIVERS = {
    "backward": "out = f(*args)\nbackward(out)",
    "one head": "out = f(*args)\nweighed(heads(out)[:1]).backward()",
    "loss": "out = f(*args)\nweighed(heads(out)).backward()",
    "grad of some": "out = f(*args)\ntold = torch.autograd.grad(weighed(heads(out)[-1:]), leaves(args), allow_unused=True)",
    "grad unused": "out = f(*args)\ntold = torch.autograd.grad(weighed(heads(out)[:1]), leaves(args))",
    "one by one": "out = f(*args)\nfor h in heads(out): weighed([h]).backward()",
    "one by one, kept": "out = f(*args)\nfor h in heads(out): weighed([h]).backward(retain_graph=True)",
    "twice": "out = f(*args)\nweighed(heads(out)).backward()\nweighed(heads(out)).backward()",
    "twice, kept": "out = f(*args)\nweighed(heads(out)).backward(retain_graph=True)\nweighed(heads(out)).backward()",
    "two calls": "out = f(*args)\nmore = f(*args)\nweighed(heads(more)).backward()\nweighed(heads(out)).backward()",
    "penalty": "out = f(*args)\nfirst = torch.autograd.grad(weighed(heads(out)), leaves(args), create_graph=True, allow_unused=True)\nweighed([g.square() for g in first if g is not None and g.requires_grad]).backward()\ntold = first",
    "second": "out = f(*args)\nfirst = torch.autograd.grad(weighed(heads(out)[:1]), leaves(args), create_graph=True, allow_unused=True)\ntold = first, torch.autograd.grad(weighed([g for g in first if g is not None and g.requires_grad]), leaves(args), allow_unused=True)",
    "create_graph": "out = f(*args)\nweighed(heads(out)).backward(create_graph=True)\ntold = [t.grad.detach().clone() for t in leaves(args) if t.grad is not None]\nfor t in leaves(args): t.grad = None",
    "input written": "out = f(*args)\nwith torch.no_grad(): leaves(args)[0].mul_(2)\nweighed(heads(out)).backward()",
    "result written": "out = f(*args)\nwith torch.no_grad(): heads(out)[0].add_(1)\nweighed(heads(out)).backward()",
    "input's data written": "out = f(*args)\nleaves(args)[0].data.mul_(2)\nweighed(heads(out)).backward()",
    "weights written": "out = f(*args)\nfor p in parameters(net): p.data.add_(0.5)\nweighed(heads(out)).backward()",
    "weights' versions": "out = f(*args)\nwith torch.no_grad():\n    for p in parameters(net): p.add_(0.5)\nweighed(heads(out)).backward()",
    "hooks": "for t in leaves(args): t.register_hook(lambda g: g * 2)\nout = f(*args)\nheads(out)[0].register_hook(lambda g: g + 1)\nweighed(heads(out)).backward()",
    "to a result": "out = f(*args)\ntold = copies(torch.autograd.grad(weighed(heads(out)[-1:]), heads(out)[:1] + leaves(args), allow_unused=True))",
    "to all results": "out = f(*args)\ntold = [copies(torch.autograd.grad(weighed([h]), heads(out) + leaves(args), retain_graph=True, allow_unused=True)) for h in heads(out)]",
    "results retained": "out = f(*args)\nfor h in heads(out): h.retain_grad()\nweighed(heads(out)[-1:]).backward()\ntold = [h.grad for h in heads(out)]",
    "results hooked": "out = f(*args)\nfor h in heads(out)[:2]: h.register_hook(lambda g: g if g is None else g * 2)\nweighed(heads(out)[1:]).backward()",
    "result used again": "out = f(*args)\nused = heads(out)[0] * 2\nheads(out)[0].register_hook(lambda g: g.clamp(-1, 1))\n(weighed(heads(out)) + weighed([used])).backward()",
    # Each leaf's own list: autograd promises no order among leaves.
    "accumulated": "told = [[] for _ in leaves(args)]\nfor t, seen in zip(leaves(args), told): t.register_post_accumulate_grad_hook(lambda t, seen=seen: seen.append(t.grad.clone()))\nout = f(*args)\nweighed(heads(out)).backward()",
    "module hooks": "told = []\nhandles = [net.register_forward_hook(lambda m, a, r: told.append(len(a))), net.register_full_backward_hook(lambda m, gi, go: None)] if net is not None else []\nout = f(*args)\nweighed(heads(out)).backward()\nfor h in handles: h.remove()",
    "batched": "out = f(*args)\nh = heads(out)[0]\ntold = torch.autograd.grad(h, leaves(args), torch.eye(min(3, h.numel()), h.numel(), dtype=h.dtype).view(-1, *h.shape), is_grads_batched=True, allow_unused=True)",
    # A few rows: a whole Jacobian of large results takes more memory than machines have.
    "jacobian": "out = f(*args)\ntold = torch.autograd.functional.jacobian(lambda t: tuple(h.reshape(-1)[:3] for h in heads(f(t, *args[1:]))), args[0])\n",
    "autocast": "with torch.autocast('cpu', BF16): out = f(*args)\nweighed(heads(out)).backward()",
    "sgd": "steps(lambda p: torch.optim.SGD(p, 0.05, momentum=0.9), f, net, args)\nout = f(*args)",
    "adam": "steps(lambda p: torch.optim.Adam(p, 0.01), f, net, args)\nout = f(*args)",
    "adamw": "steps(lambda p: torch.optim.AdamW(p, 0.01, foreach=False), f, net, args)\nout = f(*args)",
    "clipped": "out = f(*args)\nweighed(heads(out)).backward()\ntold = torch.nn.utils.clip_grad_norm_(leaves(args) + parameters(net), 0.5)",
    "eval": "with torch.no_grad(): out = f(*args)",
    "inputs": "out = f(*args)\nweighed(heads(out)).backward(inputs=leaves(args)[:1])",
    "later": "out = f(*args)\nlate = [h.sin() * 2 for h in heads(out)]\nweighed(late).backward()",
    "no result kept": "loss = weighed(heads(f(*args)))\nloss.backward()\nout = loss",
}
