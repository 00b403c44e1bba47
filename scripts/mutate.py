#!/usr/bin/env python3
"""Puts small mistakes (mutants) into copies of the code, one at a time, and looks whether the tests fail.

usage: scripts/mutate.py [--check] [--only NAME...] [--jobs N] [--build DIR] [--label quick|full] [--suites SUITE...] [--list FILE]
       scripts/mutate.py --prepare DIR [--only NAME...]         here, with nvcc
       scripts/mutate.py --run-prepared DIR [--only NAME...]    there, with a GPU

The list's form (scripts/mutants.txt), plain text:

    # a comment: a line that begins with #
    [name-of-mutant]
    file: model/model.c
    in: function_name          optional: only from that function's definition to its end
    why: one line: what would go wrong
    suites: test_model         optional: suites to run first
    - old text
    + new text

Lines with "- " are consecutive whole lines of the file, compared without blanks at their ends, or one line that is a part of a
line. They must be found exactly once. Lines with "+ " take their place, indented as the first old line; none: it is deleted.
More "- " lines after "+ " lines are another place, with a file: or in: before it if it is elsewhere.

A mutant is killed when a suite fails or does not end in time. One that does not build counts as neither killed nor surviving.
Mutants of kernels/cuda need nvcc and a GPU, and are not run without. Exit 0: all that ran were killed (--check: all apply);
1: not so, or none ran; 2: the list or the unmutated code is at fault."""
import argparse
import difflib
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CUDA = "kernels/cuda/"
# Which suites are near a file, the longest prefix first.
NEAR = {
    "data/csv": "test_data",
    "data/dates": "test_data",
    "data/steps": "test_data",
    "data/missing": "test_data",
    "data/import_csv": "test_data test_hostile test_programs",
    "data/files": "test_files test_checkpoint test_reliability",
    "data/": "test_data test_stream test_files test_hostile test_session",
    "kernels/counting": "test_table test_model",
    "kernels/cuda/": "test_model test_golden test_optim test_kernels test_products test_session",
    "kernels/philox": "test_philox test_definitions",
    "kernels/reference/": "test_definitions test_kernels test_model test_golden test_optim test_session",
    "kernels/": "test_table test_model test_golden test_optim test_kernels test_session",
    "model/": "test_model test_golden test_session",
    "optim/": "test_optim test_golden test_session",
    "src/config": "test_config test_programs",
    "src/checkpoint": "test_checkpoint test_hostile test_session test_reliability",
    "src/kept": "test_checkpoint test_reliability test_session",
    "src/writer": "test_checkpoint test_session test_reliability",
    "src/weights": "test_weights",
    "src/safetensors": "test_weights",
    "src/feed": "test_session test_stream test_programs",
    "src/snapshot": "test_checkpoint test_session test_reliability",
    "src/loop": "test_session test_stream test_programs",
    "src/": "test_session test_programs test_checkpoint test_reliability",
}


class Fault(Exception):
    """The list, the build or the unmutated code is at fault."""


class Place:
    def __init__(self, file, function, line):
        self.file, self.function, self.line = file, function, line
        self.old, self.new = [], []


class Mutant:
    def __init__(self, name, line):
        self.name, self.line = name, line
        self.places, self.suites, self.why = [], [], ""

    def cuda(self):
        return any(place.file.startswith(CUDA) for place in self.places)


def read_list(path):
    mutants, names = [], set()
    mutant = place = file = function = None

    def fault(text):
        raise Fault(f"{path}:{number}: {text}")

    with open(path, encoding="utf-8") as lines:
        for number, raw in enumerate(lines, 1):
            line = raw.rstrip("\n")
            if not line.strip() or line.startswith("#"):
                continue
            if line.startswith("["):
                name = line.strip()[1:-1]
                if not re.fullmatch(r"[A-Za-z0-9._-]+", name) or not line.rstrip().endswith("]"):
                    fault(f"{line}: a name is made of letters, digits, '.', '_' and '-'")
                if name in names:
                    fault(f"{name} is there twice")
                names.add(name)
                mutant, place, file, function = Mutant(name, number), None, None, None
                mutants.append(mutant)
                continue
            if mutant is None:
                fault("a [name] must come first")
            key = re.match(r"(file|in|why|suites):\s*(.*?)\s*$", line)
            if key:
                if key[1] == "file":
                    file, function, place = key[2], None, None
                elif key[1] == "in":
                    function, place = key[2], None
                elif key[1] == "why":
                    mutant.why = key[2]
                else:
                    mutant.suites = key[2].split()
            elif line[0] in "-+":
                text = line[2:] if line[1:2] == " " else line[1:]
                if line[0] == "-" and (place is None or place.new):
                    if file is None:
                        fault("file: must come before the text")
                    place = Place(file, function, number)
                    mutant.places.append(place)
                elif place is None:
                    fault("'+' before '-'")
                (place.old if line[0] == "-" else place.new).append(text)
            else:
                fault(f"{line}: expected [name], file:, in:, why:, suites:, '- ' or '+ '")
    for mutant in mutants:
        number = mutant.line
        if not mutant.places or not mutant.why:
            fault(f"{mutant.name} has no {'why:' if mutant.places else 'text'}")
    return mutants


def function_lines(lines, name):
    """The definition's lines [begin, end): it begins without indentation, and the name comes before its `{`, no `;` between."""
    found, begin = [], 0
    while begin < len(lines):
        if lines[begin][:1] in ("", " ", "\t", "{", "}", "#", "/", "*"):
            begin += 1
            continue
        end = begin
        while end < len(lines) and not re.search(r"[{;]", lines[end]):
            end += 1
        head = re.split(r"[{;]", "\n".join(lines[begin:end + 1]), maxsplit=1)
        if end < len(lines) and re.search(rf"\b{re.escape(name)}\b", head[0]) and "{" in lines[end].split(";")[0]:
            while end < len(lines) and not lines[end].startswith("}") and not (end == begin and re.search(r"\};?$", lines[end])):
                end += 1
            found.append((begin, min(end + 1, len(lines))))
        begin = end + 1
    return found


def changed(text, place):
    """The file's text with the place's change; Fault unless it is found exactly once."""
    where = f"{place.file}, line {place.line} of the list"
    lines = text.split("\n")
    ranges = function_lines(lines, place.function) if place.function else [(0, len(lines))]
    if not ranges:
        raise Fault(f"{where}: no definition of {place.function}")
    old = [line.strip() for line in place.old]
    whole = [at for begin, end in ranges for at in range(begin, end - len(old) + 1)
             if [line.strip() for line in lines[at:at + len(old)]] == old]
    if len(whole) == 1:
        at = whole[0]
        indent = lines[at][:len(lines[at]) - len(lines[at].lstrip())]
        new = [indent + line if line.strip() else "" for line in place.new]
        result = lines[:at] + new + lines[at + len(old):]
    elif not whole and len(old) == 1:
        parts = [at for begin, end in ranges for at in range(begin, end) for _ in range(lines[at].count(old[0]))]
        if len(parts) != 1:
            raise Fault(f"{where}: {old[0]!r} is there {len(parts)} times, not once")
        at = parts[0]
        new = "\n".join(line.strip() for line in place.new)
        result = lines[:at] + lines[at].replace(old[0], new).split("\n") + lines[at + 1:]
    else:
        raise Fault(f"{where}: its text is there {len(whole)} times, not once")
    if result == lines:
        raise Fault(f"{where}: changes nothing")
    return "\n".join(result)


def applied(mutant, root):
    """{file: (text before, text after)}"""
    files = {}
    for place in mutant.places:
        path = os.path.join(root, place.file)
        if place.file not in files:
            if not os.path.isfile(path):
                raise Fault(f"{place.file}: no such file")
            with open(path, encoding="utf-8") as file:
                text = file.read()
            files[place.file] = (text, text)
        before, text = files[place.file]
        files[place.file] = (before, changed(text, place))
    return files


def diff(files):
    return "".join(line if line.endswith("\n") else line + "\n" for name, (before, after) in files.items()
                   for line in difflib.unified_diff(before.splitlines(True), after.splitlines(True), name, name, n=2))


def check(mutants):
    faults = 0
    for mutant in mutants:
        try:
            applied(mutant, ROOT)
            for suite in mutant.suites:
                if not os.path.exists(os.path.join(ROOT, "tests", re.sub("_full$", "", suite) + ".c")):
                    raise Fault(f"no suite {suite}")
        except Fault as fault:
            print(f"{mutant.name}: does not apply: {fault}")
            faults += 1
    print(f"{len(mutants) - faults} of {len(mutants)} mutants apply")
    return 1 if faults else 0


# ---- running ----

running = set()
running_lock = threading.Lock()


def run(command, timeout=None, **options):
    """(exit code, output); the code is None after the timeout. What it started ends with it."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                   start_new_session=True, **options)
        with running_lock:
            running.add(process.pid)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
            with running_lock:
                running.discard(process.pid)
        output.seek(0)
        return code, output.read().decode(errors="replace")


def stop(number, frame):
    for pid in list(running):
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    raise SystemExit(128 + number)


def copy_tree(to):
    """What git would commit, or without git all but build folders. A file that did not change keeps its time."""
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False)
    if listed.returncode == 0:
        names = [name for name in listed.stdout.decode().split("\0") if name]
    else:
        names = [os.path.relpath(os.path.join(folder, name), ROOT) for folder, _, files in os.walk(ROOT) for name in files]
        names = [name for name in names if name.split(os.sep)[0] not in ("build", "runs", ".git")]
    for name in names:
        source, target = os.path.join(ROOT, name), os.path.join(to, name)
        if not os.path.isfile(source):
            continue
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(source, "rb") as file:
            content = file.read()
        if os.path.exists(target):
            with open(target, "rb") as file:
                if file.read() == content:
                    continue
        with open(target, "wb") as file:
            file.write(content)
        shutil.copymode(source, target)


class Tree:
    """A copy of the sources and its build."""

    def __init__(self, folder, cuda):
        self.source, self.build = os.path.join(folder, "source"), os.path.join(folder, "build")
        os.makedirs(self.source, exist_ok=True)
        copy_tree(self.source)
        command = ["cmake", "-S", self.source, "-B", self.build, "-DCMAKE_BUILD_TYPE=Mutant", "-DCMAKE_C_FLAGS_MUTANT=-O1",
                   "-DCMAKE_CUDA_FLAGS_MUTANT=-O1", "-DPS_WERROR=OFF", f"-DPS_CUDA={'ON' if cuda else 'OFF'}"]
        if shutil.which("ninja"):
            command += ["-G", "Ninja"]
        if shutil.which("ccache"):
            command += ["-DCMAKE_C_COMPILER_LAUNCHER=ccache"] + (["-DCMAKE_CUDA_COMPILER_LAUNCHER=ccache"] if cuda else [])
        if cuda:
            command += ["-DCMAKE_CUDA_ARCHITECTURES=" + cuda]
        self.environment = dict(os.environ, CCACHE_BASEDIR=folder, CCACHE_NOHASHDIR="1")
        code, output = run(command, env=self.environment)
        if code != 0:
            raise Fault(f"does not configure:\n{output}")

    def make(self, *targets):
        command = ["cmake", "--build", self.build, "--parallel", str(parallel)]
        return run(command + (["--target", *targets] if targets else []), env=self.environment)

    def tests(self, label):
        """The suites that ctest would run: {name: (command, environment)}."""
        listed = subprocess.run(["ctest", "--test-dir", self.build, "--show-only=json-v1"], stdout=subprocess.PIPE, check=True)
        tests = {}
        for test in json.loads(listed.stdout)["tests"]:
            properties = {p["name"]: p["value"] for p in test.get("properties", [])}
            labels = properties.get("LABELS", [])
            if test["command"][0].startswith(self.build + os.sep) and ("quick" in labels or label in labels):
                tests[test["name"]] = (test["command"], [e.split("=", 1) for e in properties.get("ENVIRONMENT", [])])
        return tests


def near(mutant):
    suites = []
    for place in mutant.places:
        prefix = max((p for p in NEAR if place.file.startswith(p)), key=len, default=None)
        suites += NEAR[prefix].split() if prefix else []
    return suites


def order(mutant, seconds):
    """All suites: those it names, those that are near, the others from the fastest on."""
    return [s for s in dict.fromkeys(mutant.suites + near(mutant) + sorted(seconds, key=seconds.get)) if s in seconds]


def run_suite(test, timeout, environment=None):
    command, variables = test
    return run(command, timeout, env={**os.environ, **dict(variables), **(environment or {})})


def verdict_of(suites, tests, seconds, environment=None):
    """Who killed it, or None."""
    for suite in suites:
        limit = max(120, 10 * seconds[suite])
        begin = time.monotonic()
        code, _ = run_suite(tests[suite], limit, environment)
        if code != 0:
            took = time.monotonic() - begin
            return f"killed: {suite} did not end in {limit:.0f} s" if code is None else f"killed by {suite} in {took:.1f} s"
    return None


def run_unmutated(tests, wanted=None, environment=None):
    """Seconds of each suite, or of those wanted; they must pass."""
    seconds = {}
    for suite, test in tests.items():
        if wanted is None or suite in wanted:
            begin = time.monotonic()
            code, output = run_suite(test, None, environment)
            if code != 0:
                raise Fault(f"{suite} fails without a mutant:\n{output}")
            seconds[suite] = time.monotonic() - begin
            print(f"unmutated: {suite} passes in {seconds[suite]:.1f} s", flush=True)
    return seconds


class Results:
    def __init__(self):
        self.killed, self.survived, self.unbuilt, self.not_run, self.lock = [], [], [], [], threading.Lock()

    def add(self, mutant, kind, text):
        with self.lock:
            kind.append(mutant)
            print(f"{mutant.name}: {text}", flush=True)

    def end(self, root):
        for mutant in self.survived:
            print(f"\n{mutant.name} survived: {mutant.why}\n{diff(applied(mutant, root))}", end="")
        ran = len(self.killed) + len(self.survived) + len(self.unbuilt)
        others = [f"{len(list_)} {text}" for list_, text in ((self.survived, "survived"), (self.unbuilt, "do not build"),
                                                             (self.not_run, "not run: no GPU")) if list_]
        print(f"{len(self.killed)} of {ran} killed{''.join(', ' + text for text in others)}")
        return 0 if ran and len(self.killed) == ran else 1


def write(root, files, after):
    for name, texts in files.items():
        with open(os.path.join(root, name), "w", encoding="utf-8") as file:
            file.write(texts[after])


def work(tree, todo, results, tests, seconds, faults):
    try:
        while True:
            try:
                mutant = todo.get_nowait()
            except queue.Empty:
                return
            files = applied(mutant, tree.source)
            write(tree.source, files, 1)
            try:
                code, output = tree.make()
                if code != 0:
                    errors = [line for line in output.splitlines() if "error" in line]
                    results.add(mutant, results.unbuilt, f"does not build: {errors[0] if errors else output[-200:]}")
                    continue
                killed = verdict_of(order(mutant, seconds), tests, seconds)
                results.add(mutant, results.killed if killed else results.survived, killed or "SURVIVED")
            finally:
                write(tree.source, files, 0)
    except Exception as fault:  # told by the main thread
        faults.append(fault)


def gpu_architecture():
    """As CMake names it, or None: no GPU."""
    try:
        query = subprocess.run(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"], stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, check=True)
        return query.stdout.decode().split()[0].replace(".", "") + "-real"
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def has_nvcc():
    return shutil.which("nvcc") or os.path.exists("/usr/local/cuda/bin/nvcc")


def run_all(mutants, options, folder):
    results, architecture = Results(), gpu_architecture() if has_nvcc() else None
    chosen = [m for m in mutants if architecture or not m.cuda()]
    for mutant in mutants:
        if mutant not in chosen:
            results.add(mutant, results.not_run, "not run: no GPU")
    if not chosen:
        return results.end(ROOT)
    cuda = architecture if any(m.cuda() for m in chosen) else None
    trees = [Tree(os.path.join(folder, f"job{i}"), cuda) for i in range(min(options.jobs, len(chosen)))]
    for tree in trees:
        code, output = tree.make()
        if code != 0:
            raise Fault(f"does not build without a mutant:\n{output[-4000:]}")
    seconds = run_unmutated(trees[0].tests(options.label), options.suites)
    todo, faults = queue.Queue(), []
    for mutant in chosen:
        todo.put(mutant)
    threads = [threading.Thread(target=work, args=(tree, todo, results, tree.tests(options.label), seconds, faults))
               for tree in trees]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
    return results.end(ROOT)


# ---- built here, run elsewhere ----

LIBRARY = "libpatchstep.so"


def loaded_library(program, environment=None):
    """(name, path) of the library as the program would load it."""
    code, output = run(["ldd", program], env={**os.environ, **(environment or {})})
    found = re.search(rf"^\s*({re.escape(LIBRARY)}\S*) => (/\S+)", output, re.MULTILINE)
    if code != 0 or not found:
        raise Fault(f"{program} loads no {LIBRARY}:\n{output}")
    return found[1], found[2]


def prepare(mutants, options, folder):
    """DIR/base: the suites that the mutants name or that are near, and the library; DIR/NAME: the library with that mutant alone."""
    mutants = [m for m in mutants if m.cuda()]
    wanted = options.suites or {suite for mutant in mutants for suite in mutant.suites + near(mutant)}
    tree = Tree(os.path.join(folder, "prepare"), "90-real")
    code, output = tree.make()
    if code != 0:
        raise Fault(f"does not build without a mutant:\n{output[-4000:]}")
    base = os.path.join(options.prepare, "base")
    os.makedirs(base, exist_ok=True)
    tests, library, built = {}, None, None
    for name, (command, environment) in tree.tests(options.label).items():
        if name not in wanted:
            continue
        library, built = loaded_library(command[0])
        shutil.copy2(command[0], base)
        places = [(key, value.replace(tree.build, "{build}").replace(tree.source, "{source}")) for key, value in environment]
        tests[name] = (os.path.basename(command[0]), command[1:], places)
    shutil.copy2(built, os.path.join(base, library))
    for name in os.listdir(tree.build):
        path = os.path.join(tree.build, name)
        if os.path.isfile(path) and os.access(path, os.X_OK) and "." not in name:  # the programs
            shutil.copy2(path, base)
    with open(os.path.join(options.prepare, "tests.json"), "w", encoding="utf-8") as file:
        json.dump(tests, file, indent=1)
    faults = 0
    for mutant in mutants:
        files = applied(mutant, tree.source)
        write(tree.source, files, 1)
        code, output = tree.make()
        write(tree.source, files, 0)
        if code == 0:
            os.makedirs(os.path.join(options.prepare, mutant.name), exist_ok=True)
            shutil.copy2(built, os.path.join(options.prepare, mutant.name, library))
        else:
            errors = [line for line in output.splitlines() if "error" in line]
            faults += 1
        print(f"{mutant.name}: {'built' if code == 0 else 'does not build: ' + (errors[0] if errors else output[-200:])}", flush=True)
    return 1 if faults else 0


def run_prepared(mutants, options):
    folder = os.path.abspath(options.run_prepared)
    mutants = [m for m in mutants if os.path.isdir(os.path.join(folder, m.name))]
    results = Results()
    if not gpu_architecture():
        for mutant in mutants:
            results.add(mutant, results.not_run, "not run: no GPU")
        return results.end(ROOT)
    base = os.path.join(folder, "base")
    with open(os.path.join(folder, "tests.json"), encoding="utf-8") as file:
        listed = json.load(file)
    tests = {name: ([os.path.join(base, program), *arguments],
                    [(key, value.replace("{build}", base).replace("{source}", ROOT)) for key, value in environment])
             for name, (program, arguments, environment) in listed.items()}

    def loading(name):
        """The environment in which programs take that folder's library; they must be seen to."""
        there = os.path.join(folder, name)
        environment = {"LD_LIBRARY_PATH": there + ":" + os.environ.get("LD_LIBRARY_PATH", "")}
        _, path = loaded_library(next(iter(tests.values()))[0][0], environment)
        if os.path.dirname(os.path.abspath(path)) != there:
            raise Fault(f"{name}: {path} would be loaded instead of its own library")
        return environment

    seconds = run_unmutated(tests, options.suites, loading("base"))
    for mutant in mutants:
        killed = verdict_of(order(mutant, seconds), tests, seconds, loading(mutant.name))
        results.add(mutant, results.killed if killed else results.survived, killed or "SURVIVED")
    return results.end(ROOT)


parallel = 1


def main():
    global parallel
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS)
    parser.add_argument("--list", default=os.path.join(ROOT, "scripts", "mutants.txt"), metavar="FILE")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mutants alone")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="trees side by side")
    parser.add_argument("--build", metavar="DIR", help="keeps the copies and their builds there, for the next time")
    parser.add_argument("--label", choices=("quick", "full"), default="quick", help="full: the suites' long forms too")
    parser.add_argument("--suites", nargs="+", metavar="SUITE", help="these suites alone: what they leave, others may see")
    parser.add_argument("--check", action="store_true", help="only whether each mutant still applies")
    parser.add_argument("--prepare", metavar="DIR", help="builds the mutants of kernels/cuda, for --run-prepared")
    parser.add_argument("--run-prepared", metavar="DIR", help="runs those on this machine's GPU")
    options = parser.parse_args()
    parallel = max(1, (os.cpu_count() or 1) // max(1, options.jobs))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    folder = None
    try:
        mutants = read_list(options.list)
        unknown = set(options.only or []) - {m.name for m in mutants}
        if unknown:
            raise Fault(f"{options.list}: no mutant {', '.join(sorted(unknown))}")
        mutants = [m for m in mutants if not options.only or m.name in options.only]
        if options.check:
            return check(mutants)
        if options.run_prepared:
            return run_prepared(mutants, options)
        folder = os.path.abspath(options.build) if options.build else tempfile.mkdtemp(prefix="patchstep-mutants-")
        for mutant in mutants:
            applied(mutant, ROOT)
        if options.prepare:
            options.prepare = os.path.abspath(options.prepare)
            return prepare(mutants, options, folder)
        return run_all(mutants, options, folder)
    except Fault as fault:
        print(f"mutate: {fault}", file=sys.stderr)
        return 2
    finally:
        if folder and not options.build:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
