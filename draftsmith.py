"""draftsmith: recipes in, proven and published draft heads out. The whole pipeline on one screen.

    prompts -> answers -> tokens -> features -> head -> checkpoint -> record -> verdict -> publication

Exit codes: 0 done, 1 your input, 2 the gate refused, 3 the environment (a dead engine, a full disk, a missing package).
"""

import argparse
import contextlib
import errno
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from recipes import outside, show
from recipes.arguments import parser
from recipes.artifact import Make, Stage, State, build, read_manifest, state
from recipes.faults import EnvironmentFault, GateRefused
from recipes.load import load
from recipes.lock import locked
from recipes.schema import Recipe


def _from(module: str) -> Make:
    """A stage's function, imported when it runs: --help and plan need no torch."""
    return lambda recipe, run, out: importlib.import_module(module).make(recipe, run, out)


# What a measurement depends on: everything but where the head goes and who watches.
MEASURED = ("target", "domains", "seed", "answers", "capture", "head", "train", "export", "gate", "engine")
STAGES = (
    Stage(name="target", verb="prepare", make=_from("data.target"), inputs=(), keys=("target",),
          outside=outside.target),
    Stage(name="prompts", verb="prepare", make=_from("data.prompts"), inputs=(),
          keys=("domains", "seed", "answers.max_turns", "answers.mode"), outside=outside.sources),
    Stage(name="answers", verb="prepare", make=_from("data.answers"), inputs=("target", "prompts"), keys=("answers",)),
    Stage(name="tokens", verb="prepare", make=_from("data.tokens"), inputs=("answers",),
          keys=("domains", "head.draft_vocab_size")),
    Stage(name="features", verb="capture", make=_from("data.capture"), inputs=("target", "tokens"), keys=("capture",)),
    Stage(name="head", verb="train", make=_from("train.launch"), inputs=("target", "tokens", "features"),
          keys=("head", "train")),
    Stage(name="checkpoint", verb="export", make=_from("export.speculators"), inputs=("target", "head"),
          keys=("export",)),
    Stage(name="record", verb="measure", make=_from("eval.measure"),
          inputs=("target", "prompts", "head", "checkpoint"), keys=MEASURED, outside=outside.incumbent),
    Stage(name="verdict", verb="gate", make=_from("eval.gate"),
          inputs=("target", "prompts", "head", "checkpoint", "record"), keys=(*MEASURED, "cost"),
          outside=outside.prices),
    Stage(name="publication", verb="publish", make=_from("export.hub"),
          inputs=("target", "head", "checkpoint", "record", "verdict"), keys=("publish",)),
)  # fmt: skip
VERBS = tuple(dict.fromkeys(stage.verb for stage in STAGES))
GATED = ("verdict", "publication")


def run_stages(recipe: Recipe, run: Path, until: str = "publication") -> None:
    """Make every stage up to `until` (a stage or verb) that is not done. Raises GateRefused where the verdict is no."""
    last = max(i for i, stage in enumerate(STAGES) if until in (stage.name, stage.verb))
    with locked(run):
        _end_orphans(run)
        while (found := _next_open(recipe, run, last)) is not None:
            stage, why = found
            if stage.name == "publication":
                _require_pass(run)
            _make(stage, recipe, run, why)
        if last >= _index("verdict"):
            _require_pass(run)


def run_verb(recipe: Recipe, run: Path, verb: str) -> None:
    """Make one verb's stages. Raises ValueError (GateRefused for gate and publish) where what they need is not done."""
    with locked(run):
        _end_orphans(run)
        if verb == "gate":
            importlib.import_module("eval.gate").require_record(run)  # it knows why a measurement stopped
        for stage in (s for s in STAGES if s.verb == verb):
            _require_inputs(stage, recipe, run)
            own = state(stage, recipe, run, deep=True)
            if own.status != "done":
                _make(stage, recipe, run, own.why)
            if stage.name == "verdict":
                _require_pass(run)


def publish_otherwise(recipe: Recipe, run: Path, rollback: str | None) -> None:
    """Print what was put back on main (`rollback` is its tag), or else what publishing would commit."""
    if rollback is not None:  # an empty tag must not publish
        print(importlib.import_module("export.rollback").rollback(recipe.publish, rollback))
        return
    _require_inputs(STAGES[_index("publication")], recipe, run)
    print(importlib.import_module("export.hub").dry_run(recipe, run))


def states(recipe: Recipe, run: Path) -> dict[str, State]:
    """Each stage's state; a stage whose input is not done waits for it."""
    found: dict[str, State] = {}
    for stage in STAGES:
        waiting = [name for name in stage.inputs if found[name].status != "done"]
        own = state(stage, recipe, run)
        if own.status == "done" and waiting:
            own = State(status="stale", why=f"{waiting[0]} will change")
        found[stage.name] = own
    return found


def _next_open(recipe: Recipe, run: Path, last: int) -> tuple[Stage, str] | None:
    """The first stage to make, and why; a damaged input of it comes first (sizes show most damage, hashes the rest)."""
    for stage in STAGES[: last + 1]:
        own = state(stage, recipe, run)
        if own.status != "done":
            for name in stage.inputs:
                found = state(STAGES[_index(name)], recipe, run, deep=True)
                if found.status != "done":
                    return STAGES[_index(name)], found.why
            return stage, own.why
    return None


def _make(stage: Stage, recipe: Recipe, run: Path, why: str) -> None:
    _say(f"{stage.name}: {why}")
    manifest = build(stage, recipe, run)
    _say(f"{stage.name}: done in {manifest['wall_s']:.0f} s  {show.brief(manifest['accounting'])}")


def _require_inputs(stage: Stage, recipe: Recipe, run: Path) -> None:
    for name in stage.inputs:
        found = state(STAGES[_index(name)], recipe, run, deep=True)
        if found.status != "done":
            fault = GateRefused if stage.name in GATED else ValueError
            raise fault(
                f"{stage.verb}: {name} is not done ({found.why}); `draftsmith {STAGES[_index(name)].verb}` first"
            )
    if stage.name == "publication":
        _require_pass(run)


def _require_pass(run: Path) -> None:
    verdict = json.loads((run / "verdict" / "verdict.json").read_text(encoding="utf-8"))
    if not verdict["passed"]:
        raise GateRefused("the gate says no:\n" + "\n".join(f"  {r['why']}" for r in verdict["refusals"]))


def _end_orphans(run: Path) -> None:
    for pid in importlib.import_module("data.engine").end_orphans(run):
        _say(f"ended an engine that a killed run left behind (pid {pid})")


def _index(name: str) -> int:
    return next(i for i, stage in enumerate(STAGES) if stage.name == name)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def show_status(recipe: Recipe, run: Path, as_json: bool) -> None:
    """Print each stage's state and accounting."""
    found = states(recipe, run)
    rows = {n: {"status": s.status, "why": s.why, **_made(run / n)} for n, s in found.items()}
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    print(show.status(rows))


def show_plan(recipe: Recipe, run: Path, as_json: bool) -> None:
    """Print what each stage would do and cost. Raises ValueError where something would stop it."""
    from recipes import estimate, estimate_mode

    figures, found = estimate.estimate(recipe), states(recipe, run)
    left = [name for name, own in found.items() if own.status != "done"]
    faults = estimate.preflight(recipe, run, figures, left)
    mode, why = estimate_mode.fitting_mode(recipe, estimate_mode.free_bytes(run))
    if as_json:
        rows = {n: {"status": s.status, "why": s.why, **figures.stages[n]} for n, s in found.items()}
        print(json.dumps({"stages": rows, "totals": figures.totals, "mode": mode, "faults": faults}, indent=1))
    else:
        print(estimate.table({n: (s.status, s.why) for n, s in found.items()}, figures))
        print(why)
        for fault in faults:
            print(f"preflight: {fault}")
    if faults:
        raise ValueError(f"{len(faults)} preflight fault{'s' * (len(faults) > 1)}; mend them before `draftsmith run`")


def _made(folder: Path) -> dict[str, Any]:
    manifest = read_manifest(folder)
    return {k: manifest[k] for k in ("accounting", "wall_s", "finished")} if manifest else {}


def command(args: argparse.Namespace) -> None:
    """Do what the command line says."""
    if args.verb == "export" and args.check:
        importlib.import_module("eval.agreement").check(args.check, args.target, args.prompts)
        return
    if not args.recipe:
        raise ValueError("export: name a recipe, or --check FOLDER")
    recipe = load(args.recipe, args.overrides)
    run = Path(args.runs) / recipe.name
    if args.verb == "plan":
        show_plan(recipe, run, args.json)
    elif args.verb == "status":
        show_status(recipe, run, args.json)
    elif args.verb == "heads":
        print(importlib.import_module("export.heads").heads(recipe.publish, args.json))
    elif args.verb == "gate" and args.dry_run:
        print(importlib.import_module("eval.needs").needs(recipe, run))
    elif args.verb == "publish" and (args.rollback is not None or args.dry_run):
        publish_otherwise(recipe, run, args.rollback)
    elif args.verb == "run":
        run_stages(recipe, run, args.until)
    else:
        run_verb(recipe, run, args.verb)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # bars are for people
    try:
        command(_parse(argv))
    except ValueError as error:
        return _fail(1, str(error))
    except GateRefused as error:
        return _fail(2, str(error))
    except EnvironmentFault as error:
        return _fail(3, str(error))
    except ModuleNotFoundError as error:
        return _fail(3, f"package {error.name!r} is not installed; `make install` brings all")
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return _fail(3, f"the disk is full ({error.filename}); free some space and run again" if full else str(error))
    except KeyboardInterrupt:
        return _fail(3, "stopped; the next run goes on from here")
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line; overrides may stand before or after options. Raises ValueError where it cannot be read."""
    try:
        args, rest = parser(__doc__ or "", VERBS, tuple(s.name for s in STAGES)).parse_known_args(argv)
    except SystemExit as ended:  # argparse ends with 2, which here means that the gate refused
        raise SystemExit(1 if ended.code == 2 else ended.code) from None
    strange = [word for word in rest if word.startswith("-") or "=" not in word]
    if strange:
        raise ValueError(f"{args.verb}: cannot read {' '.join(strange)}; see `draftsmith {args.verb} --help`")
    args.overrides = [*args.overrides, *rest]
    return args


def _fail(code: int, message: str) -> int:
    with contextlib.suppress(BrokenPipeError):
        _say(f"draftsmith: {message}")
    return code


if __name__ == "__main__":
    sys.exit(main())
