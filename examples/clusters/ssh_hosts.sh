#!/bin/bash
# bash examples/clusters/ssh_hosts.sh run_t5_pretraining.py --config run.yaml
#
# Edit HOSTS, WORKERS (per host) and INTERFACE. ssh needs no password, and this folder and environment have the same
# paths on all hosts. SIGTERM, Ctrl-C or a failed host end the job on all hosts, and the run saves a checkpoint.
HOSTS=(n1 n2)
WORKERS=8
INTERFACE=eth0

# Each ssh reads a pipe whose write end, 3, is open here alone. At its end the host sends SIGTERM to torchrun.
pipe=$(mktemp -u) && mkfifo "$pipe" && exec 3<>"$pipe" 4<"$pipe" && rm "$pipe" || exit
on_host='cd "$0" && exec 3<&0 || exit; "$@" & job=$!; { cat <&3; kill $job; } >/dev/null 2>&1 & wait $job'

set -o pipefail
for rank in "${!HOSTS[@]}"; do
    host=${HOSTS[rank]}
    command=(bash -c "$on_host" "$PWD" env GLOO_SOCKET_IFNAME="$INTERFACE" NCCL_SOCKET_IFNAME="$INTERFACE"
        "$(command -v torchrun)" --nnodes "${#HOSTS[@]}" --nproc_per_node "$WORKERS" --node_rank "$rank"
        --master_addr "${HOSTS[0]#*@}" --master_port 29500 "$@")
    { ssh -o ServerAliveInterval=10 "$host" "${command[*]@Q}" 2>&1 | sed -u "s/^/[$host] /"; } <&4 3>&- &
done

trap : INT TERM
for _ in "${HOSTS[@]}"; do
    wait -n || { code=$?; break; } # a host failed, or a signal arrived: 128 + its number
done
exec 3>&-
wait
exit "${code:-0}"
