"""The command line's verbs and options."""

import argparse

from recipes.load import shipped

_TEXTS = {
    "plan": "what each stage would do and cost, before anything starts",
    "run": "make every stage that is not done, in order",
    "status": "each stage: done, to do or stale, and why",
    "prepare": "target, prompts, the target's answers, tokens and draft vocabulary",
    "capture": "the target's hidden states",
    "train": "the head",
    "export": "the Speculators folder; with --check FOLDER, validate anybody's",
    "measure": "serve target and head in vLLM and keep the raw record",
    "gate": "judge the record: exit code 2 means no",
    "publish": "push what passed to the Hub, or to a folder laid out like it; --rollback TAG takes it back",
    "heads": "what is published on the Hub, with its figures",
}


def parser(about: str, verbs: tuple[str, ...], stages: tuple[str, ...]) -> argparse.ArgumentParser:
    """The parser; `about` stands on top of --help, `verbs` and `stages` are where `run --until` may end."""
    top = argparse.ArgumentParser(
        prog="draftsmith", description=about, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"Shipped recipes: {', '.join(shipped())}. `draftsmith VERB --help` says more.",
    )  # fmt: skip
    words = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb, text in _TEXTS.items():
        one = words.add_parser(verb, help=text, description=text)
        nargs = "?" if verb == "export" else None
        one.add_argument("recipe", nargs=nargs, help="a YAML file or a shipped recipe's name")
        one.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. train.tokens=100000")
        one.add_argument("--runs", default="runs", help="where runs live (default: runs)")
        if verb in ("plan", "status", "heads"):
            one.add_argument("--json", action="store_true", help="for machines")
        if verb == "run":
            one.add_argument("--until", default="publication", choices=[*verbs, *stages])
        if verb == "publish":
            instead = one.add_mutually_exclusive_group()
            instead.add_argument("--rollback", metavar="TAG", help="put this earlier head on main again")
            instead.add_argument("--dry-run", action="store_true", help="say what would be committed, change nothing")
        if verb == "gate":
            one.add_argument("--dry-run", action="store_true", help="say what the gate would need, judge nothing")
        if verb == "export":
            one.add_argument("--check", metavar="FOLDER", help="validate this folder instead")
            one.add_argument("--target", default="", help="the target's folder, to compare FOLDER with")
            one.add_argument("--prompts", default="", help="JSONL with `prompt`: serve FOLDER too, and replay it")
    return top
