"""`python -m vitrify bench`: every measurement in a process of its own, eager, Vitrify and peers in turns within it.

Writes one JSON file with the machine's name in it, and prints tables:
calls: what a call costs. bandwidth: bytes that kernels move, beside a copy. networks, training: first call and steady calls. memory: of a whole process.
layers: what the first step of training costs above eager's first, for Llamas of 8 and of 32 layers (compile_ms; `times` is against the smaller one), with
the time of each stage of the compiler; medians of --repeats processes, each of which has compiled a Llama of one layer before.
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

CALLS = ("x+1", "10 pointwise", "mlp")
LAYERS = (8, 32)
BUDGETS = [1.0, 0.75, 0.5, 0.25, 0.0]


def peak_rss_mib() -> float:
    """The most that this process has had resident, since it began or since forget_peak()."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


def forget_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def stage_times() -> dict:
    """Milliseconds of compile time by stage, of this process."""
    import vitrify
    return {stage: us / 1e3 for stage, us in vitrify.metrics()["compile_us"].items()}


def compilers(peers: bool):
    import vitrify
    from vitrify import demo
    return {"vitrify": vitrify.compile} | (demo.load_peers() if peers else {})


def measure_network(name: str, size: str, seconds: float, peers: bool) -> dict:
    from vitrify import demo
    row = demo.measure(name, size, seconds, demo.load_peers() if peers else {})
    row["stages_ms"] = stage_times()
    return row


def measure_training(name: str, size: str, seconds: float, peers: bool) -> dict:
    from vitrify import demo
    return demo.measure_training(name, size, seconds, demo.load_peers() if peers else {}) | {"stages_ms": stage_times()}


def measure_memory(name: str, size: str, which: str, training: bool, budget: float = 1.0) -> dict:
    """Peak resident memory of one kind of run alone in its process: of the process, and of calls or steps after the first five."""
    import torch
    import vitrify
    from vitrify import demo, networks
    module, inputs = networks.build(name, size)
    if training:
        module.train()
    call = module if which == "eager" else vitrify.compile(module, options={"memory_budget": budget}) if which == "vitrify" else demo.load_peers()[which](module)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True) if training else None

    def step():
        if not training:
            with torch.no_grad():
                return call(*inputs)
        optimizer.zero_grad()
        networks.loss(name, call(*inputs), inputs).backward()
        optimizer.step()
    for _ in range(5):
        step()
    row = {"network": name, "which": which, "peak_rss_mib": peak_rss_mib()}
    if forget_peak():
        for _ in range(5):
            step()
        row |= {"steady_peak_rss_mib": peak_rss_mib(), "process_peak_rss_mib": max(peak_rss_mib(), row["peak_rss_mib"])}
    return row


def measure_budget(name: str, size: str, seconds: float, budgets: list[float]) -> dict:
    """Bytes that a forward keeps for its backward (of eager, and for each memory_budget), and the time of forward, loss and backward, in turns."""
    import torch
    import vitrify
    from vitrify import measure as m, networks
    module, inputs = networks.build(name, size)
    module.train()
    own = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers(), *inputs)}
    calls = {"eager": module} | {str(b): vitrify.compile(module, fullgraph=True, options={"memory_budget": b}) for b in budgets}

    def kept(call):
        storages = {}

        def pack(t):
            s = t.untyped_storage()
            storages[s._cdata] = (s.nbytes(), t)  # t: while it lives, nothing else comes to lie there
            return t
        with torch.autograd.graph.saved_tensors_hooks(vitrify.mark_lossless(pack), lambda t: t):
            call(*inputs)
        return sum(n for at, (n, _) in storages.items() if at not in own) / 2**20

    def step(call):
        module.zero_grad()
        networks.loss(name, call(*inputs), inputs).backward()
    fns = {k: partial(step, call) for k, call in calls.items()}
    for fn in fns.values():
        fn(), fn()
    mib = {k: kept(call) for k, call in calls.items()}
    steady = m.medians(m.interleave(fns, seconds))
    full = str(max(budgets))
    rows = [{"network": name, "budget": k, "kept_mib": mib[k], "kept": mib[k] / mib[full], "ms": 1e3 * steady[k], "time": steady[k] / steady[full]} for k in calls]
    return {"network": name, "budgets": rows, "counters": dict(vitrify.counters)}


def measure_call(what: str, seconds: float, peers: bool) -> dict:
    import torch
    from torch import nn
    from vitrify import measure as m

    def chain(x):
        x = x + 1
        x = x * 2
        x = torch.relu(x)
        x = x - 0.5
        x = torch.sigmoid(x)
        x = x * x
        x = torch.tanh(x)
        x = x + 0.25
        x = torch.abs(x)
        return x * 3
    torch.manual_seed(0)
    fn, arg = {"x+1": (lambda x: x + 1, torch.randn(16)), "10 pointwise": (chain, torch.randn(16)),
               "mlp": (nn.Sequential(nn.Linear(17, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 6)), torch.randn(64, 17))}[what]
    fns = {"eager": lambda: fn(arg)}
    for name, compile_one in compilers(peers).items():
        compiled = compile_one(fn)
        fns[name] = lambda compiled=compiled: compiled(arg)
    first = {}
    with torch.no_grad():
        for name, call in fns.items():
            start = time.perf_counter()
            call()
            first[f"{name}_first_ms"] = round(1e3 * (time.perf_counter() - start), 3)
            for _ in range(200):
                call()
        steady = m.medians(m.interleave(fns, seconds, rounds=25))
        did = m.counted(fns["vitrify"])
    return {"call": what, "kernels": did.get("kernels_launched", 0), **first, **{f"{k}_us": round(1e6 * v, 3) for k, v in steady.items()}}


def measure_bandwidth(seconds: float) -> dict:
    """Bytes that must move over the time that the compiled call takes, beside a copy measured in turns with it."""
    import torch
    import vitrify
    from vitrify import measure as m
    torch.manual_seed(0)
    x, y = torch.randn(8192, 2048), torch.randn(8192, 2048)
    out = torch.empty_like(x)
    size = x.numel() * 4
    gelu, norm = torch.nn.functional.gelu, torch.nn.functional.layer_norm
    # Arguments, not closures: what a function closes over is frozen, and a result of frozen values alone is computed once.
    cases = {
        "gelu(x*y)+x": (lambda x, y: gelu(x * y) + x, 3 * size),
        "softmax(x)": (lambda x, y: torch.softmax(x, -1), 2 * size),
        "layer_norm(x+y)": (lambda x, y: norm(x + y, (2048,)), 3 * size),
        "sum(x, 0)": (lambda x, y: x.sum(0), size),
        "sum(x)": (lambda x, y: x.sum(), size),
        "x.t() + y.t() as new": (lambda x, y: (x.t() + y.t()).contiguous(), 3 * size),
        "x + y.t()": (lambda x, y: x.view(4096, 4096) + y.view(4096, 4096).t(), 3 * size),
        "NCHW to NHWC": (lambda x, y: 2 * x.view(64, 64, 64, 64).permute(0, 2, 3, 1).contiguous(), 2 * size),
    }
    fns, moved = {"copy": lambda: out.copy_(x)}, {"copy": 2 * size}
    with torch.no_grad():
        for name, (fn, moves) in cases.items():
            compiled = vitrify.compile(fn)
            compiled(x, y), compiled(x, y)
            fns[name], moved[name] = partial(compiled, x, y), moves
            fns[name + " eager"], moved[name + " eager"] = partial(fn, x, y), moves
        for name, wrap in {"AdamW, 100 tensors": vitrify.compile, "AdamW, 100 tensors eager": lambda step: step}.items():
            weights = [torch.randn(256, 512) for _ in range(100)]
            for w in weights:
                w.grad = torch.randn_like(w)
            fns[name] = wrap(torch.optim.AdamW(weights).step)
            moved[name] = 7 * sum(w.numel() for w in weights) * 4  # reads weight, gradient and two averages; writes all but the gradient
            for _ in range(3):
                fns[name]()
        steady = m.medians(m.interleave(fns, seconds))
    return {"bandwidth_gb_s": {name: round(moved[name] / t / 1e9, 2) for name, t in steady.items()}}


def measure_layers(layers: int) -> dict:
    """The first step of training of a Llama with so many layers: what capturing and compiling it costs, beside eager's first step."""
    import torch
    import vitrify
    from transformers import LlamaConfig, LlamaForCausalLM
    from vitrify import measure as m
    tokens = torch.randint(0, 4000, (1, 64))

    def steps(layers):
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=4000, hidden_size=256, intermediate_size=688, num_hidden_layers=layers, num_attention_heads=8,
                             num_key_value_heads=4, max_position_embeddings=256, use_cache=False)
        module = LlamaForCausalLM(config).train()

        def step(run):
            loss = []
            forward = m.once(lambda: loss.append(run(tokens, labels=tokens).loss))
            backward = m.once(loss[0].backward)
            module.zero_grad()
            return 1e3 * forward, 1e3 * backward
        eager, compiled = [step(module) for _ in range(4)], vitrify.compile(module)
        return eager, [step(compiled) for _ in range(4)]
    steps(1)  # what any first compile of a process costs, whatever its size: the code generator is opened, Python modules are imported
    vitrify.reset()
    eager, ours = steps(layers)
    row = {"layers": layers, "eager_first_ms": sum(eager[0]), "eager_ms": statistics.median(map(sum, eager[1:])), "forward_first_ms": ours[0][0],
           "backward_first_ms": ours[0][1], "compiled_ms": statistics.median(map(sum, ours[1:])), "compile_ms": sum(ours[0]) - sum(eager[0])}
    return row | {"kernels_built": dict(vitrify.counters).get("kernels_built", 0), "stages_ms": stage_times()}


def median_row(rows: list[dict]) -> dict:
    """Of measurements of one thing, each in a process of its own: the median of each figure; the first that failed where one did."""
    failed = [r for r in rows if "failed" in r]
    if failed:
        return failed[0]
    stages = {stage: statistics.median(r["stages_ms"].get(stage, 0.0) for r in rows) for stage in rows[0]["stages_ms"]}
    return {k: statistics.median(r[k] for r in rows) for k in rows[0] if k != "stages_ms"} | {"runs": len(rows), "stages_ms": stages}


def child(task: dict) -> dict:
    import torch
    if task.get("threads"):
        torch.set_num_threads(task["threads"])
    kind = task["kind"]
    if kind == "network":
        return measure_network(task["name"], task["size"], task["seconds"], task["peers"])
    if kind == "memory":
        return measure_memory(task["name"], task["size"], task["which"], task.get("training", False), task.get("budget", 1.0))
    if kind == "budget":
        return measure_budget(task["name"], task["size"], task["seconds"], task["budgets"])
    if kind == "training":
        return measure_training(task["name"], task["size"], task["seconds"], task["peers"])
    if kind == "layers":
        return measure_layers(task["layers"])
    if kind == "call":
        return measure_call(task["name"], task["seconds"], task["peers"])
    if kind == "bandwidth":
        return measure_bandwidth(task["seconds"])
    if kind == "machine":
        from vitrify import measure as m
        return m.machine() | {"copy_gb_s": round(m.copy_bandwidth(), 2)}
    raise ValueError(kind)


def run(task: dict, timeout: float) -> dict:
    """One measurement in a fresh process; what went wrong is a row too."""
    try:
        out = subprocess.run([sys.executable, "-m", "vitrify.bench", "--child", json.dumps(task)], capture_output=True, text=True, timeout=timeout,
                             env=dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p)))
    except subprocess.TimeoutExpired:
        return {"failed": f"no result in {timeout:.0f} s", **task}
    for line in reversed(out.stdout.splitlines()):
        if line.startswith("RESULT "):
            return json.loads(line[7:])
    return {"failed": (out.stderr or out.stdout).strip()[-600:], **task}


def table(title: str, rows: list[dict], columns: list[str], console) -> None:
    from rich.table import Table
    console.print(title, style="bold")
    view = Table(box=None, padding=(0, 1))
    for i, column in enumerate(columns):
        view.add_column(column, justify="left" if i == 0 else "right", no_wrap=True)
    for row in rows:
        if "failed" in row:
            view.add_row(str(row.get("name") or row.get("network") or row.get("layers") or row.get("kind")), "failed: " + row["failed"].splitlines()[-1][:60])
            continue
        view.add_row(*(("" if row.get(c) is None else f"{row[c]:.4g}" if isinstance(row[c], float) else str(row[c])) for c in columns))
    console.print(view)


def main(argv: list[str] | None = None) -> int:
    from vitrify import networks
    parser = argparse.ArgumentParser(prog="bench", description="Eager, Vitrify and torch.compile side by side, each measurement in a fresh process.")
    parser.add_argument("--models", help="comma-separated, of: " + ", ".join(networks.NETWORKS) + "; none to skip")
    parser.add_argument("--size", default="s", choices=["xs", "s", "l"])
    parser.add_argument("--seconds", type=float, default=5.0, help="steady time of each measurement")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one process")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--no-peers", action="store_true", help="leave torch.compile out")
    parser.add_argument("--only", help="comma-separated, of: calls, bandwidth, networks, training, layers, memory, budget")
    parser.add_argument("--repeats", type=int, default=3, help="processes for each figure of memory and layers, of which the median counts")
    parser.add_argument("--json", metavar="FILE", default="build/bench.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        result = child(json.loads(args.child))
        print("RESULT " + json.dumps(result))
        return 0

    from rich.console import Console
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    peers = not args.no_peers
    only = set(args.only.split(",")) if args.only else {"calls", "bandwidth", "networks", "training", "layers", "memory", "budget"}
    names = [] if args.models == "none" else args.models.split(",") if args.models else [n for n in networks.NETWORKS if not networks.NETWORKS[n].missing()]
    common = {"seconds": args.seconds, "peers": peers, "threads": args.threads, "size": args.size}

    def task(**what):
        with console.status(" ".join(str(v) for v in what.values())):
            return run(common | what, args.timeout)
    started = time.time()
    here = task(kind="machine")
    console.print(", ".join(f"{k} {v}" for k, v in here.items()))
    report: dict = {"machine": here, "size": args.size, "calls": [], "networks": [], "training": [], "layers": [], "memory": [], "memory_training": [], "budget": [], "bandwidth": {}}
    if "calls" in only:
        report["calls"] = [task(kind="call", name=name) for name in CALLS]
        table("\ncall overhead, microseconds (first calls: milliseconds)", report["calls"], ["call", "eager_us", "vitrify_us", *(["torch.compile_us"] if peers else []), "kernels", "eager_first_ms", "vitrify_first_ms"], console)
    if "bandwidth" in only:
        result = task(kind="bandwidth")
        report["bandwidth"] = result.get("bandwidth_gb_s", result)
        rows = [{"kernel": k, "GB/s": v} for k, v in result.get("bandwidth_gb_s", {}).items()] or [result]
        table("\nachieved bandwidth, beside a copy in the same process", rows, ["kernel", "GB/s"], console)
    if "networks" in only:
        report["networks"] = [task(kind="network", name=name) for name in names]
        table("\nnetworks, inference, float32: milliseconds (first: above an eager call)", report["networks"],
              ["network", "first_ms", "eager_ms", "compiled_ms", "speedup", *(["torch.compile_first_ms", "torch.compile_ms"] if peers else []),
               "error", "error_eager", "kernels", "externs", "fallbacks"], console)
        stages: dict[str, float] = {}
        for row in report["networks"]:
            for stage, ms in row.get("stages_ms", {}).items():
                stages[stage] = stages.get(stage, 0.0) + ms
        table("\ncompile time by stage, all networks, ms", [{"stage": k, "ms": v} for k, v in sorted(stages.items(), key=lambda kv: -kv[1])], ["stage", "ms"], console)
    if "training" in only:
        report["training"] = [task(kind="training", name=name) for name in names]
        table("\na step of training (forward, loss, backward, AdamW), float32: milliseconds (first: above an eager step)", report["training"],
              ["network", "first_ms", "eager_ms", "compiled_ms", "speedup", *(["torch.compile_first_ms", "torch.compile_ms"] if peers else []),
               "loss_difference", "kernels", "externs", "fallbacks"], console)
    if "layers" in only:
        measured = [[task(kind="layers", layers=n) for n in LAYERS] for _ in range(args.repeats)]  # in turns
        report["layers"] = rows = [median_row([turn[i] for turn in measured]) for i in range(len(LAYERS))]
        if not any("failed" in r for r in rows):
            for row in rows:
                row["times"] = row["compile_ms"] / rows[0]["compile_ms"]
        names_of_stages = {s for r in rows for s in r.get("stages_ms", {})}
        table(f"\nfirst step of training (forward, loss, backward) of a Llama by its layers: milliseconds, medians of {args.repeats} processes "
              "(compile: ours above eager's first)", rows,
              ["layers", "eager_first_ms", "eager_ms", "forward_first_ms", "backward_first_ms", "compiled_ms", "compile_ms", "times", "kernels_built"], console)
        table("\ncompile time by stage, ms", [{"stage": s} | {f"{r['layers']} layers": r["stages_ms"].get(s, 0.0) for r in rows if "failed" not in r}
                                              for s in sorted(names_of_stages)], ["stage", *(f"{n} layers" for n in LAYERS)], console)
    kinds = ["eager", "vitrify", *(["torch.compile"] if peers else [])]
    for training in (False, True) if "memory" in only else ():
        rows = report["memory_training" if training else "memory"]
        for name in names:
            row: dict = {"network": name}
            for which in kinds:
                runs = [task(kind="memory", name=name, which=which, training=training) for _ in range(args.repeats)]
                row |= {f"{which}_failed": r["failed"] for r in runs if "failed" in r}
                for key, column in (("process_peak_rss_mib", which), ("steady_peak_rss_mib", which + " steady")):
                    values = [r[key] for r in runs if key in r]
                    row |= {column: round(statistics.median(values), 1), column + " runs": values} if values else {}
            rows.append(row)
        what = "five steps of training and five" if training else "five calls and five"
        table(f"\npeak resident memory, MiB: of a process that makes {what} more, compiling included; and of the last five alone (steady)", rows,
              ["network", *kinds, *(k + " steady" for k in kinds)], console)
    if "budget" in only:
        for name in [n for n in names if n == "gpt2" or args.models]:
            result = task(kind="budget", name=name, budgets=BUDGETS)
            for row in result.get("budgets", []):
                if row["budget"] != "eager":
                    row["steady peak"] = task(kind="memory", name=name, which="vitrify", training=True, budget=float(row["budget"])).get("steady_peak_rss_mib")
            report["budget"] += result.get("budgets", [result])
        table("\nmemory_budget: MiB that forward keeps for backward, ms of forward, loss and backward, each over that of budget 1; peak of a step with AdamW, MiB",
              report["budget"], ["network", "budget", "kept_mib", "kept", "ms", "time", "steady peak"], console)
    report["seconds"] = round(time.time() - started, 1)
    path = Path(args.json)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    console.print(f"\n{report['seconds']} s; written to {path}")
    failed = [r for part in ("calls", "networks", "training", "layers", "budget") for r in report[part] if "failed" in r]
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
