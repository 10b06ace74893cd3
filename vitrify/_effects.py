"""A call that a plan has refused, or that has failed, after custom ops have run: eager gets what they gave, and does not run them again."""
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class _Given(TorchDispatchMode):
    def __init__(self, effects):
        super().__init__()
        self.effects = effects

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not self.effects or func.name() != self.effects[0][0]:
            return func(*args, **(kwargs or {}))
        _, results, random, error = self.effects.pop(0)
        if random is not None:
            torch.set_rng_state(random)
        schema = func._schema
        written = [args[i] if i < len(args) else kwargs.get(a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
        written = [t for w in written if w is not None for t in (w if isinstance(w, (list, tuple)) else [w])]
        times = []  # each was written, where nothing else counts that
        if error is None and written and len(results) == sum(r.alias_info is None for r in schema.returns) + 2 * len(written):
            results, times = results[:-len(written)], results[-len(written):]
        fresh = results[:len(results) - len(written)]
        for t, value in zip(written, results[len(fresh):]):
            t.copy_(value)
        for t, n in zip(written, times):
            for _ in range(int(n)):
                torch.autograd.graph.increment_version(t)
        if error is not None:
            raise error
        if len(schema.returns) == 1 and isinstance(schema.returns[0].type, torch.ListType):
            return fresh
        return None if not schema.returns else fresh[0] if len(schema.returns) == 1 else tuple(fresh)


def call(effects, f, *args, **kwargs):
    if not effects:
        return f(*args, **kwargs)
    with _Given(effects):
        return f(*args, **kwargs)
