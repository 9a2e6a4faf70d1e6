"""Job files of `lmtools launch`: those of docs/clusters.md, and what they do beside stand-ins for srun and ssh."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
import yaml

from lm_experiments_tools.tools.launch_args import seconds_of
from lm_experiments_tools.tools.main import main
from tests.helpers import ROOT

PAGE = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
SHOWN = re.findall(
    r"^```bash\n(lmtools launch [^\n]*--print[^\n]*)\n```\n\n```\w+\n(.*?)^```", PAGE, flags=re.M | re.S
)
RUN = "data_path: x\nvocab: v\nmodel_cfg: t5-small\nmodel_path: runs/small\ninput_seq_len: 512\nlr: 1e-3\n"
# Prints its arguments as JSON, and where it is; $ENDS is its exit code.
TELLS = "#!/bin/bash\n{python} -c 'import json, os, sys; print(json.dumps([os.getcwd(), *sys.argv[1:]]))' \"$@\"\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A clone's script and its settings, as the current folder."""
    (tmp_path / "run_t5_pretraining.py").symlink_to(ROOT / "run_t5_pretraining.py")
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def launch(capsys):
    def launch(*words):
        code = main(["launch", *map(str, words)])
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        return code, shown.out, shown.err

    return launch


def program(folder, name, text):
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_the_page_shows_each_kind():
    assert len(SHOWN) == 6


@pytest.mark.parametrize(("command", "text"), SHOWN)
def test_the_page_shows_what_is_submitted(command, text, launch, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/shared/env/bin/python")
    monkeypatch.setattr(os, "getcwd", lambda: "/shared/lm")
    code, shown, error = launch(*shlex.split(command)[2:])
    assert (code, error) == (0, "") and shown == text


@pytest.mark.parametrize(
    ("launcher", "ends", "told", "code"),
    [("srun", 0, "", 0), ("srun", 143, "", 143), ("srun", 1, "", 1)]
    + [("torchrun", 0, "", 0), ("torchrun", 1, "", 1), ("torchrun", 1, "told", 143), ("torchrun", 0, "told", 0)],
)
def test_the_batch_file_is_put_into_the_queue_again_when_it_has_saved(
    launcher, ends, told, code, launch, folder, monkeypatch
):
    """srun hands the tasks' code on, and a torchrun that is told to end says 1; words come through any quoting."""
    python = TELLS.format(python=sys.executable) + f"{'kill -TERM $PPID' if told else ''}\nexit {ends}\n"
    monkeypatch.setattr(sys, "executable", str(program(folder, "python", python)))
    flags = ["--config", "run.yaml", "--data_path", "a b", "$HOME", "it's", 'say "x"', "*;", "--model_path", "my run"]
    _, text, _ = launch("--slurm", "--launcher", launcher, "--print", "--", "run_t5_pretraining.py", *flags)
    assert "#SBATCH --requeue\n" in text and "#SBATCH --signal=TERM@300\n" in text
    tools = folder / "bin"
    tools.mkdir()
    program(tools, "srun", '#!/bin/bash\nshift 2\n"$@"\n')
    program(tools, "scontrol", '#!/bin/bash\n[ $1 = show ] && echo n1 || echo "$@"\n')
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_NODEID": "0"}
    ended = subprocess.run(["bash"], input=text, capture_output=True, text=True, env=environment, check=False)
    words, *more = ended.stdout.splitlines()
    assert json.loads(words)[-len(flags) - 1 :] == ["run_t5_pretraining.py", *flags], ended.stderr
    assert ended.returncode == code and more == (["requeue 7"] if code == 143 else [])
    if launcher == "torchrun":
        assert json.loads(words)[3:7] == ["--nnodes", "1", "--nproc_per_node", "1"] and "15007" in words


def test_a_host_runs_the_job_until_this_end_leaves(launch, folder, monkeypatch):
    """Words, folder and environment of the command that ssh is given; its code; SIGTERM for it."""
    (folder / "a folder").mkdir()
    (folder / "a folder" / "run.yaml").write_text(RUN)
    monkeypatch.chdir(folder / "a folder")
    python = TELLS.format(python=sys.executable) + 'echo "$GREETING"\nexec sleep $SLEEPS\n'
    monkeypatch.setattr(sys, "executable", str(program(folder, "python", python)))
    flags, greeting = ["--config", "run.yaml", "--data_path", "it's $HOME"], 'it\'s "me" $HOME'
    options = ("--hosts", "n1:2,n2:3", "--env", f"GREETING={greeting}", "--print")
    code, text, _ = launch(*options, "--", "pretrain-t5", *flags)
    assert code == 0 and len(text.splitlines()) == 2
    program(folder, "ssh", '#!/bin/bash\necho "$1"\nexec sh -c "$2"\n')  # as sshd has the user's shell do
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def connect(line, sleeps):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen(line, shell=True, env={**os.environ, "SLEEPS": sleeps}, **pipes)

    for rank, line in enumerate(text.splitlines()):
        with connect(line, "x") as job:  # sleep refuses it
            name, words, said = job.stdout.read().splitlines()
            assert job.wait() == 1
        where, *given = json.loads(words)
        assert (name, where, said) == (f"n{rank + 1}", os.getcwd(), greeting)
        numbers = f"--nnodes 2 --nproc_per_node {rank + 2} --node_rank {rank} --master_addr n1 --master_port 29500"
        script = str(ROOT / "run_t5_pretraining.py")
        assert given == ["-m", "torch.distributed.run", *numbers.split(), script, *flags]
    with connect(line, "60") as job:
        assert [job.stdout.readline() for _ in range(3)][2]
        job.stdin.close()
        assert job.wait(timeout=10) == 128 + signal.SIGTERM


@pytest.mark.parametrize("where", ["--slurm", "--hosts"])
@pytest.mark.parametrize(
    ("lines", "code", "printed"),
    [
        (["export GREETING='hello you' # for nccl", "true; # false"], 0, "hello you\n"),
        (["echo 1; false # at all", "echo 2"], 2, "1\n"),
        (["echo 1", "echo 'not closed", "echo 2"], 2, "1\n"),
    ],
)
def test_lines_of_setup_come_first_and_end_the_job_if_they_fail(
    where, lines, code, printed, launch, folder, monkeypatch
):
    monkeypatch.setattr(sys, "executable", str(program(folder, "python", '#!/bin/bash\necho "$GREETING"\n')))
    options = [where, "n1:1"] if where == "--hosts" else [where]
    _, text, _ = launch(*options, "--setup", *lines, "--print", "--", "pretrain-t5", "--config", "run.yaml")
    program(folder, "ssh", '#!/bin/bash\nexec sh -c "$2"\n')
    program(folder, "srun", '#!/bin/bash\nshift 2\nexec "$@"\n')
    (folder / "job").write_text(text)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}"}
    job = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen(["bash", "job"], **job) as started:  # its input stays open
        assert (started.stdout.read(), started.wait()) == (printed, code)


def test_a_failure_on_one_host_ends_the_others(launch, folder, monkeypatch):
    python = program(folder, "python", '#!/bin/bash\ncase "$*" in *"node_rank 1"*) exit 3;; esac\nexec sleep 60\n')
    monkeypatch.setattr(sys, "executable", str(python))
    program(folder, "ssh", '#!/bin/bash\nexec sh -c "$2"\n')
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    start = time.monotonic()
    code, _, error = launch("--hosts", "n1:1,n2:1", "--", "pretrain-t5", "--config", "run.yaml")
    assert code == 3 and error == "lmtools launch: n2 ended with exit code 3: ending the job on n1\n"
    assert time.monotonic() - start < 20


def test_what_outlives_a_job_and_holds_its_output_is_not_waited_for():
    module = "lm_experiments_tools.tools.launch_hosts"
    program = f"import sys, {module} as hosts; sys.exit(hosts.run_on_hosts({{'a': 'echo said; sleep 40 & exit 3'}}))"
    end = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=25)
    assert (end.returncode, end.stdout) == (3, "said\n")


@pytest.mark.parametrize("both", [False, True], ids=["output", "output_and_errors"])
def test_a_job_whose_reader_leaves_is_told_to_save(both, folder):
    """As by `| head` and `2>&1 | head`: what workers still print while they save is read, and goes nowhere."""
    work = "exec 3<&0; yes & job=$!; read -r _ <&3; kill $job; seq 100000; touch saved; exit 143"
    module = "lm_experiments_tools.tools.launch_hosts"
    program = f"import sys, {module} as hosts; sys.exit(hosts.run_on_hosts({{'a': {work!r}}}))"
    errors = subprocess.STDOUT if both else subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=errors, text=True) as job:
        assert job.stdout.readline() == "y\n"
        job.stdout.close()
        try:
            assert job.wait(timeout=25) == 128 + signal.SIGPIPE
        finally:
            job.kill()
        said = "lmtools launch: the output cannot be written (Broken pipe): ending the job on a\n"
        assert both or job.stderr.read() == said
    assert (folder / "saved").exists()


# Fields of a TrainJob: manifests/base/crds/trainer.kubeflow.org_trainjobs.yaml of kubeflow/trainer v2.2.0 and v2.3.0.
POD = {
    "volumes": [{"name": str, "persistentVolumeClaim": {"claimName": str}}],
    "containers": [{"name": str, "volumeMounts": [{"name": str, "mountPath": str}]}],
}
TRAIN_JOB = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "namespace": str},
    "spec": {
        "runtimeRef": {"name": str},
        "trainer": {
            "image": str, "command": [str], "numNodes": int, "numProcPerNode": int,
            "env": [{"name": str, "value": str}],
            "resourcesPerNode": {"requests": {"cpu": int}, "limits": {"nvidia.com/gpu": int}},
        },
        "runtimePatches": [
            {"manager": str, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [
                {"name": str, "template": {"spec": {"template": {"spec": POD}}}}
            ]}}}}
        ],
    },
}  # fmt: skip


def check_fields(value, kind, where="TrainJob"):
    if isinstance(kind, dict):
        assert set(value) <= set(kind), where
        for name, part in value.items():
            check_fields(part, kind[name], f"{where}.{name}")
    elif isinstance(kind, list):
        assert isinstance(value, list), where
        for part in value:
            check_fields(part, kind[0], where)
    else:
        assert type(value) is kind, where


def test_a_train_job_is_what_kubernetes_takes(launch, folder):
    """Also by the definition itself, where KUBEFLOW_CRD names the file of a release."""
    where = (
        "--image",
        "i",
        "--namespace",
        "lab",
        "--volume",
        "data:/data",
        "--env",
        "N=$(N)",
        "--name",
        "Run_1.5",
        "--print",
    )
    code, text, _ = launch(
        "--kubeflow",
        "--nodes",
        2,
        "--gpus",
        4,
        *where,
        "--",
        "pretrain-t5",
        "--config",
        "run.yaml",
        "--vocab",
        "$$(HOME)",
    )
    found = yaml.safe_load(text)
    check_fields(found, TRAIN_JOB)
    assert code == 0 and (found["apiVersion"], found["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert found["metadata"] == {"name": "run-1-5", "namespace": "lab"}
    trainer = found["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
    words = "torchrun --no-python lmtools pretrain-t5 --config run.yaml --vocab $$$$(HOME)".split()
    assert trainer["command"] == ["bash", "-c", f'cd {folder} && exec "$$0" "$$@"', *words]
    assert {"name": "N", "value": "$$(N)"} in trainer["env"]  # of $$ Kubernetes makes $, of $(N) a variable
    if file := os.environ.get("KUBEFLOW_CRD"):
        import jsonschema

        versions = yaml.safe_load(open(file, encoding="utf-8"))["spec"]["versions"]
        schema = strict(versions[0]["schema"]["openAPIV3Schema"])
        jsonschema.validate(found, schema)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**found, "spec": {**found["spec"], "numNodes": 2}}, schema)


def test_relative_paths_of_a_train_job_start_where_it_was_submitted(launch, folder, monkeypatch):
    """Also in a folder whose name shells and Kubernetes would change; a pod without it says so and trains nothing."""
    submitted = folder / "it's $(HOME) $$"
    submitted.mkdir()
    (submitted / "run.yaml").write_text(RUN)
    monkeypatch.chdir(submitted)
    flags = ["--config", "run.yaml", "--data_path", "a b", "$HOME"]
    _, text, _ = launch("--kubeflow", "--print", "--", "pretrain-t5", *flags)
    command = [word.replace("$$", "$") for word in yaml.safe_load(text)["spec"]["trainer"]["command"]]
    program(folder, "torchrun", TELLS.format(python=sys.executable))
    environment = {"PATH": f"{folder}:{os.environ['PATH']}"}

    def in_a_pod():
        return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, check=False)

    assert json.loads(in_a_pod().stdout) == [str(submitted), "--no-python", "lmtools", "pretrain-t5", *flags]
    submitted.rename(folder / "elsewhere")
    ended = in_a_pod()
    assert ended.returncode == 1 and ended.stderr.endswith(f"cd: {submitted}: No such file or directory\n")
    assert not ended.stdout


def strict(schema):
    """A schema as the API server reads it: unknown fields are refused, and x-kubernetes-int-or-string is either."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: strict(part) for key, part in schema.items()}
    if "properties" in found and found["properties"] and found.get("type") == "object":
        found.setdefault("additionalProperties", False)
    if "properties" in found and set(found["properties"]) >= {"apiVersion", "kind", "metadata"}:
        found["properties"]["metadata"] = {"type": "object"}
    return found


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("-- pretrain-t5", "nothing says where the job runs"),
        ("--slurm --ray -- pretrain-t5", "--slurm and --ray exclude each other"),
        ("--slurm", "no script is given"),
        ("--slurm run_t5_pretraining.py --lr 1", "put -- before the script"),
        ("--slurm -- train.py", "train.py is no file here, nor one of pretrain-t5"),
        ("--slurm -- run.yaml", "run.yaml is no Python script: after -- stands the script"),
        (
            "--slurm --nodes 5 -- pretrain-t5 --config run.yaml --reproducible elastic",
            "--virtual_ranks 12 cannot be shared equally by 5 workers",
        ),
        ("--slurm -- pretrain-t5 --config run.yaml --lrr 1", "did you mean --lr?"),
        ("--slurm -- pretrain-t5 --config absent.yaml", "--config absent.yaml cannot be read"),
        ("--slurm -- pretrain-t5 --config run.yaml --iters 0", "--iters is 0"),
        ("--slurm -- pretrain-t5 --data_path x --vocab v --model_cfg t5-small --lr 1", "give the script --model_path"),
        ("--slurm --nodes 0 -- pretrain-t5", "--nodes is 0: it must be at least 1"),
        ("--slurm --nodes 2 -- pretrain-t5 --config run.yaml --backend local", "has one worker, and the job 2"),
        ("--slurm -- pretrain-t5 --config run.yaml --backend horovod", "--launcher horovodrun, with --hosts"),
        ("--slurm --launcher horovodrun -- pretrain-t5", "take --hosts"),
        ("--slurm --gpus 2 --workers 2 -- pretrain-t5", "exclude each other"),
        (
            "--slurm --time 5 -- pretrain-t5 --config run.yaml",
            "--time 5 is 300 s, of which --grace 300 leaves nothing",
        ),
        ("--slurm --time tomorrow -- pretrain-t5", "is no time of sbatch's"),
        ("--slurm --name a/b -- pretrain-t5", "--name 'a/b' may have"),
        (
            ("--slurm", "--partition", "a\ntrue", "--", "pretrain-t5", "--config", "run.yaml"),
            "partition 'a\\ntrue' has a line break",
        ),
        ("--slurm --env 1A=2 -- pretrain-t5", "is not NAME=VALUE"),
        ("--slurm --sbatch A=lab -- pretrain-t5", "is no option of sbatch without its dashes"),
        ("--slurm --sbatch nodes=7 -- pretrain-t5", "--sbatch nodes=7 would contradict the rest of the file"),
        ("--hosts a:1 --port 70000 -- pretrain-t5", "--port is 70000: it must be at most 65535"),
        ("--slurm --accelerate_config x -- pretrain-t5", "add --launcher accelerate"),
        ("--slurm --image i -- pretrain-t5", "--image is about --kubeflow"),
        ("--slurm --port 1 -- pretrain-t5", "is for --hosts"),
        ("--ray --time 1:00 -- pretrain-t5", "--time is about --slurm"),
        ("--ray --launcher torchrun -- pretrain-t5", "Ray and Kubeflow start workers themselves"),
        ("--kubeflow --interface eth0 -- pretrain-t5", "a pod has one network"),
        ("--kubeflow --volume data -- pretrain-t5", "is not CLAIM:/path"),
        ("--kubeflow --name 1a -- pretrain-t5 --config run.yaml", "a letter first"),
        ("--hosts a:8,a:8 -- pretrain-t5", "each machine once"),
        ("--hosts a -- pretrain-t5", "is not NAME:WORKERS"),
        ("--hosts a:1 --nodes 2 -- pretrain-t5", "--nodes is not read with --hosts"),
        ("--hosts a:1,b:2 --launcher accelerate -- pretrain-t5", "as many workers on each machine"),
        ("--hosts a:1 --launcher srun -- pretrain-t5", "is Slurm's"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_is_submitted(words, sentence, launch, monkeypatch):
    monkeypatch.setattr(subprocess, "run", None)
    monkeypatch.setattr(subprocess, "Popen", None)
    code, out, error = launch(*(words.split() if isinstance(words, str) else words))
    assert code == 2 and sentence in error and len(error.strip().splitlines()) == 1 and not out


@pytest.mark.parametrize(
    ("where", "sentence"),
    [
        ("--slurm", "sbatch is not installed here: submit on a login node"),
        ("--kubeflow", "kubectl is not installed here"),
        ("--ray", "pip install 'ray"),
        ("--hosts a:1", "needs ssh, which is not installed"),
        ("--hosts a:1 --launcher horovodrun", "lmtools build-horovod"),
    ],
)
def test_an_engine_that_is_not_installed_is_a_sentence(where, sentence, launch, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, error = launch(*where.split(), "--", "pretrain-t5", "--config", "run.yaml")
    assert code == 2 and sentence in error and len(error.strip().splitlines()) == 1


def test_what_sbatch_says_is_handed_on(launch, folder, monkeypatch):
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    program(folder, "sbatch", "#!/bin/bash\ncat > submitted\necho Submitted batch job 7\n")
    code, out, _ = launch("--slurm", "--", "pretrain-t5", "--config", "run.yaml")
    assert (code, out) == (0, "Submitted batch job 7\n")
    assert (folder / "submitted").read_text().startswith("#!/bin/bash\n#SBATCH --job-name=small\n")
    program(folder, "sbatch", "#!/bin/bash\necho sbatch: error: no such account >&2\nexit 1\n")
    code, _, error = launch("--slurm", "--", "pretrain-t5", "--config", "run.yaml")
    assert (code, error) == (2, "error: sbatch refused the job: sbatch: error: no such account\n")


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("5:30", 330), ("24:00:00", 86400), ("2-00", 172800), ("1-1:30", 91800), ("1-0:0:9", 86409)],
)
def test_times_are_read_as_sbatch_reads_them(time, seconds):
    assert seconds_of(time) == seconds
