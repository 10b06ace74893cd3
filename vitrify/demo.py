"""`python -m vitrify demo`: networks that people use, eager beside compiled."""
from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import sys
import warnings
from pathlib import Path

COLUMNS = [("network", 20), ("first call", 11), ("eager", 9), ("compiled", 9), ("speed-up", 8), ("error", 9), ("eager's", 9), ("kernels", 7), ("externs", 7), ("fallbacks", 9)]


TRAINING_COLUMNS = [("training step", 20), ("first step", 11), ("eager", 9), ("compiled", 9), ("speed-up", 8), ("loss differs", 12), ("kernels", 7), ("externs", 7), ("fallbacks", 9)]


def load_peers():
    """bench/peers.py of the checkout: other compilers, measured beside us. They are no part of the package."""
    path = Path(__file__).resolve().parent.parent / "bench" / "peers.py"
    if not path.exists():
        raise SystemExit("--peers needs a checkout: bench/peers.py is not installed with the package")
    spec = importlib.util.spec_from_file_location("vitrify_bench_peers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PEERS


def measure(name: str, size: str, seconds: float, peers=None) -> dict:
    import torch
    import vitrify
    from vitrify import measure as m, networks
    module, inputs = networks.build(name, size)
    row: dict = {"network": name, "size": size}
    vitrify.reset()
    before = dict(vitrify.counters)
    with torch.no_grad():
        for _ in range(2):
            eager_result = module(*inputs)
        eager_once = min(m.once(lambda: module(*inputs)) for _ in range(2))
        compiled = vitrify.compile(module)
        row["first_ms"] = 1e3 * (m.once(lambda: compiled(*inputs)) - eager_once)
        result = compiled(*inputs)
        reference = m.double_run(module, inputs)
        row["error"], row["error_eager"] = m.error(result, reference), m.error(eager_result, reference)
        row["accurate"] = m.within(row["error"], row["error_eager"])
        del reference, result, eager_result
        fns = {"eager": lambda: module(*inputs), "compiled": lambda: compiled(*inputs)}
        for peer, make in (peers or {}).items():
            call = make(module)
            row[f"{peer}_first_ms"] = 1e3 * (m.once(lambda: call(*inputs)) - eager_once)
            fns[peer] = lambda call=call: call(*inputs)
        for fn in fns.values():
            fn()
        steady = m.medians(m.interleave(fns, seconds))
        per_call = m.counted(fns["compiled"])
    row |= {f"{k}_ms": 1e3 * v for k, v in steady.items()}
    row["speedup"] = steady["eager"] / steady["compiled"]
    built = {k: v - before.get(k, 0) for k, v in dict(vitrify.counters).items()}
    row |= {"kernels": per_call.get("kernels_launched", 0), "externs": per_call.get("externs_called", 0), "kernels_built": built.get("kernels_built", 0),
            "fallbacks": per_call.get("fallbacks", 0) + per_call.get("eager_calls", 0), "graph_breaks": built.get("graph_breaks", 0)}
    return row


def measure_training(name: str, size: str, seconds: float, peers=None) -> dict:
    """A step of training: forward, loss, backward, AdamW. Each side trains a copy of its own."""
    import copy
    import torch
    import vitrify
    from vitrify import measure as m, networks
    module, inputs = networks.build(name, size)
    module.train()
    row: dict = {"network": name, "size": size}
    vitrify.reset()

    def trainer(compile_it):
        net = copy.deepcopy(module)
        run = compile_it(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)

        def step():
            optimizer.zero_grad()
            loss = networks.loss(name, run(*inputs), inputs)
            loss.backward()
            optimizer.step()
            return loss.detach()
        return step
    eager, compiled = trainer(lambda net: net), trainer(vitrify.compile)
    torch.manual_seed(1)
    curve, first = [], []
    for step in (eager, compiled):  # of both, the first step makes the optimizer's state as well
        torch.manual_seed(1)
        first.append(m.once(lambda step=step: curve.append([float(step())])))
        curve[-1] += [float(step()) for _ in range(2)]
    row["first_ms"] = 1e3 * (first[1] - first[0])
    row["loss_difference"] = max(abs(a - b) / max(abs(b), 1e-6) for a, b in zip(curve[1], curve[0]))
    fns = {"eager": eager, "compiled": compiled}
    for peer, make in (peers or {}).items():
        fns[peer] = trainer(make)
        row[f"{peer}_first_ms"] = 1e3 * (m.once(fns[peer]) - first[0])
    for fn in fns.values():
        fn()
    steady = m.medians(m.interleave(fns, seconds))
    row |= {f"{k}_ms": 1e3 * v for k, v in steady.items()}
    row["speedup"] = steady["eager"] / steady["compiled"]
    per_call = m.counted(compiled)
    row |= {"kernels": per_call.get("kernels_launched", 0), "externs": per_call.get("externs_called", 0),
            "fallbacks": per_call.get("fallbacks", 0) + per_call.get("eager_calls", 0)}
    return row


def ms(value):
    return f"{value:.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms" if value >= 0.1 else f"{1e3 * value:.1f} us"


def cells(row: dict, peers, training=False) -> list[str]:
    from vitrify import networks
    accuracy = [f"{row['loss_difference']:.1e}"] if training else [f"{row['error']:.1e}", f"{row['error_eager']:.1e}"]
    text = [networks.NETWORKS[row["network"]].title, f"{row['first_ms']:+.0f} ms", ms(row["eager_ms"]), ms(row["compiled_ms"]), f"{row['speedup']:.2f}x",
            *accuracy, str(row["kernels"]), str(row["externs"]), str(row["fallbacks"])]
    for peer in peers:
        text += [f"{row[peer + '_first_ms'] / 1e3:+.1f} s", ms(row[f"{peer}_ms"])]
    return text


class Table:
    """Rows as they are measured; a network that fails must not hide the others."""

    def __init__(self, console, columns, peers, training=False):
        self.console, self.peers, self.training = console, peers, training
        self.columns = columns + [c for peer in peers for c in ((f"{peer} first", len(peer) + 6), (peer, max(9, len(peer))))]
        self.rows, self.failed = [], []
        self.line([c for c, _ in self.columns], ["bold"] * len(self.columns))

    def line(self, values, styles=()):
        from rich.text import Text
        text = Text()
        for i, (value, (_, width)) in enumerate(zip(values, self.columns)):
            text.append((f"{value:<{width}}" if i == 0 else f"{value:>{width}}") + "  ", style=styles[i] if i < len(styles) else "")
        self.console.print(text, soft_wrap=True)

    def add(self, name, run):
        from vitrify import networks
        network = networks.NETWORKS[name]
        if network.missing():
            return self.line([network.title, f"needs {network.needs} (pip install)"])
        noise = io.StringIO()
        try:
            with self.console.status(network.title), warnings.catch_warnings(), contextlib.redirect_stdout(noise):
                warnings.simplefilter("ignore", DeprecationWarning)
                row = run(name)
        except Exception as problem:
            self.failed.append(name)
            return self.console.print(f"{network.title:<20}  failed: {type(problem).__name__}: {problem}", style="red", soft_wrap=True)
        self.rows.append(row)
        styles = [""] * len(self.columns)
        styles[4] = "green" if row["speedup"] >= 1 else "red"
        styles[5] = "" if self.training or row["accurate"] else "red"
        self.line(cells(row, self.peers, self.training), styles)

    def close(self):
        product = 1.0
        for row in self.rows:
            product *= row["speedup"]
        if self.rows:
            self.console.print(f"geometric mean of the speed-ups: {product ** (1 / len(self.rows)):.2f}x over {len(self.rows)} networks\n")
        wrong = [r["network"] for r in self.rows if not r.get("accurate", True)]
        if wrong:
            self.console.print(f"less accurate than the rule allows (twice eager's error): {', '.join(wrong)}", style="red")
        self.failed += wrong


def main(argv: list[str] | None = None) -> int:
    from vitrify import networks
    parser = argparse.ArgumentParser(prog="python -m vitrify demo", description="Networks that people use: eager beside compiled.")
    parser.add_argument("--models", help="comma-separated, of: " + ", ".join(networks.NETWORKS))
    parser.add_argument("--what", default="both", choices=["inference", "training", "both"])
    parser.add_argument("--size", default="s", choices=["xs", "s", "l"])
    parser.add_argument("--seconds", type=float, default=3.0, help="time for the steady measurement of each network")
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--peers", action="store_true", help="measure torch.compile in the same run (needs a C++ compiler)")
    parser.add_argument("--json", metavar="FILE", help="write what was measured")
    args = parser.parse_args(argv)
    names = args.models.split(",") if args.models else list(networks.NETWORKS)
    for name in names:
        if name not in networks.NETWORKS:
            parser.error(f"no network named {name!r}: choose from {', '.join(networks.NETWORKS)}")

    import torch
    from rich.console import Console
    from vitrify import measure as m
    if args.threads:
        torch.set_num_threads(args.threads)
    peers = load_peers() if args.peers else {}
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 200)
    here = m.machine()
    console.print(f"{here['cpu']}, {here['threads']} threads, torch {here['torch']}, Python {here['python']}; float32, random weights\n")
    tables = {}
    if args.what in ("inference", "both"):
        tables["rows"] = Table(console, COLUMNS, peers)
        for name in names:
            tables["rows"].add(name, lambda name: measure(name, args.size, args.seconds, peers))
        tables["rows"].close()
    if args.what in ("training", "both"):
        tables["training"] = Table(console, TRAINING_COLUMNS, peers, training=True)
        for name in names:
            tables["training"].add(name, lambda name: measure_training(name, args.size, args.seconds, peers))
        tables["training"].close()
    failed = [name for t in tables.values() for name in t.failed]
    console.print("first call: time above an eager call; first step: above eager's first. error: largest difference from an fp64 run, relative. A step: forward, loss, backward, AdamW. "
                  "kernels, externs, fallbacks: of one call.", style="dim", soft_wrap=True)
    if args.json:
        Path(args.json).write_text(json.dumps({"machine": here, **{k: t.rows for k, t in tables.items()}, "failed": failed}, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
