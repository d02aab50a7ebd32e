"""Write docs/infermax.md and its charts."""

from collections.abc import Callable
from pathlib import Path

from benchmarks.infermax import claims, exact, figures
from benchmarks.infermax.claims import Finding

DOCS = Path(__file__).parents[2] / "docs"
CLAIMS: dict[str, tuple[str, Callable[[], Finding]]] = {
    "IM1": ("Preempting is up to 30 % cheaper than never preempting", claims.preemption_pays),
    "IM2": ("The wrong scheduler costs 6 times the throughput", claims.wrong_scheduling),
    "IM3": ("vLLM's prefill first has the lowest latency until outputs are long", claims.vllm_until_outputs_are_long),
    "IM4": (
        "Throughput rises with the batch, and falls for very short and very long outputs",
        claims.throughput_over_batches,
    ),
    "IM5": ("Batches get smaller as prompts grow", claims.batches_over_prompts),
    "IM6": ("Evictions grow with outputs and with R_max", claims.evictions_over_outputs),
    "IM7": ("Time per output token is driven by evictions", claims.tpot_by_evictions),
    "IM8": ("Never evicting: throughput slightly up, time to first token up", claims.never_evicting),
    "IM9": ("Evicting small requests helps, large ones hurts, by 30 %", claims.who_is_evicted),
    "IM10": ("More memory alone saturates: bandwidth is needed", claims.memory_and_bandwidth),
    "IM11": ("With little memory evicting lowers latency", claims.little_memory),
    "IM12": ("The best R_max falls with prompt and output", claims.places_over_lengths),
    "IM13": ("Batch time is linear in each of four terms", exact.terms_are_linear),
    "IM14": ("Work of the host can be overlapped", exact.host_can_overlap),
    "IM15": ("The optimum beats heuristics", exact.optimum_beats_heuristics),
    "IM16": ("Replacing the shortest first beats the newest first", claims.shortest_replaced_first),
    "IM17": (
        "Without evictions requests hold memory, and M bounds the running size",
        figures.memory_by_scheduler,
    ),
    "IM18": ("I is memory at once, O the peak about O batches later", figures.prompts_now_outputs_later),
    "IM19": ("Evictions grow with the batch and with outputs", figures.evictions_over_places_and_outputs),
    "IM20": ("Never evicting has the lowest TPOT and the highest TTFT", figures.latencies_by_scheduler),
    "IM21": ("Small requests first raise the throughput", figures.small_first),
}


def main() -> None:
    """Run every experiment, and write the page."""
    found = {name: test() for name, (_, test) in CLAIMS.items()}
    rows = [f"| {name} | {claim} | {found[name].verdict} |" for name, (claim, _) in CLAIMS.items()]
    parts = [(Path(__file__).parent / "intro.md").read_text(encoding="utf-8") + "\n".join(rows) + "\n"]
    for name, (claim, test) in CLAIMS.items():
        finding = found[name]
        pictures = "".join(f"\n![{claim}](experiments/{file})\n" for file in finding.charts)
        where = f"`{test.__module__.removeprefix('benchmarks.infermax.')}.{test.__name__}`"
        verdict, measured = (text[0].upper() + text[1:] for text in (finding.verdict, finding.measured))
        parts.append(f"\n## {name}: {claim}\n\n**{verdict}.** {measured} ({where}).\n{pictures}")
        for file, svg in finding.charts.items():
            (DOCS / "experiments" / file).write_text(svg, encoding="utf-8")
    (DOCS / "infermax.md").write_text("".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main()
