#!/usr/bin/env bash
# Builds every wheel into dist and tries them in two empty environments: the three that a newcomer installs, then all.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=$PWD/.venv/bin/python
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_QUIET=2
unset TINKER_API_KEY TINKER_BASE_URL VIRTUAL_ENV PYTHONPATH

say() { printf 'wheels: %s\n' "$*"; }

# A new environment under $work/$1; its commands come first from here on.
new_environment() {
    "$python" -m venv "$work/$1"
    PATH="$work/$1/bin:$path"
    hash -r
}
path=$PATH

# The report of an installation must say that all of ours came from dist, and not from an index that has the same name.
all_from_dist() {
    "$python" - "$1" "$PWD/dist" "$2" <<'PYTHON'
import json, sys
from pathlib import Path

report, dist, expected = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), int(sys.argv[3])
urls = [item["download_info"]["url"] for item in report["install"] if item["metadata"]["name"].startswith("tinker-atropos")]
strangers = [url for url in urls if not url.startswith(dist.as_uri())]
if strangers or len(urls) != expected:
    sys.exit(f"expected {expected} distributions of this repository from {dist}, got {urls}")
PYTHON
}

rm -rf dist
for project in sdk adapters/* plugins/*/*; do
    [ -f "$project/pyproject.toml" ] || continue
    "$python" -m build --wheel --no-isolation --outdir dist "./$project" >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
done
say "built $(cd dist && echo *.whl)"

say "installing as the README says"
new_environment newcomer
PIP_REPORT=$work/newcomer.json pip install --find-links dist tinker-atropos tinker-atropos-gsm8k tinker-atropos-tinker
all_from_dist "$work/newcomer.json" 4
pip check
(
    cd "$work"
    tinker-atropos run --env gsm8k --trainer tinker --dry-run >dry-run.txt
    grep -q 'nothing started' dry-run.txt
    for kind in env trainer; do
        tinker-atropos "$kind" list --format json >"$kind.json"
        "$python" -c 'import json, sys; rows = json.load(open(sys.argv[1])); sys.exit(not rows or any(row["status"] != "ok" for row in rows))' "$kind.json" \
            || { cat "$kind.json"; exit 1; }
    done
)
# --local without its adapter says how to get it.
code=0; (cd "$work" && tinker-atropos run --env gsm8k --trainer tinker --local >/dev/null 2>no-adapter.txt) || code=$?
[ "$code" = 2 ] && grep -q 'pip install tinker-atropos-local-tinker' "$work/no-adapter.txt" || { cat "$work/no-adapter.txt"; exit 1; }
say "the hosted command's --dry-run passes; environment and trainer are listed as ok"

say "installing all of them together"
new_environment everything
export PIP_CONSTRAINT=$PWD/constraints.txt  # the first installation takes what is newest, as a newcomer's does
pip install "$(grep '^torch==' constraints.txt)"
names=$(for wheel in dist/*.whl; do basename "$wheel" | sed 's/-[0-9].*//; s/_/-/g'; done)
# shellcheck disable=SC2086
PIP_REPORT=$work/everything.json pip install --find-links dist $names
all_from_dist "$work/everything.json" "$(wc -w <<<"$names")"
pip check
(cd "$work" && tinker-atropos run --env gsm8k --trainer tinker --local --set env.dataset=arithmetic --dry-run | grep -q 'nothing started')
(cd "$work" && tinker-atropos serve tinker --help >serve.txt)
say "ok"
