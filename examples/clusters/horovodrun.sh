#!/bin/bash
# bash examples/clusters/horovodrun.sh run_t5_pretraining.py --config run.yaml
#
# Edit HOSTS (host:workers, the first is this one), WORKERS (their sum) and INTERFACE. ssh needs no password, and this
# folder and environment have the same paths on all hosts.
HOSTS=n1:8,n2:8
WORKERS=16
INTERFACE=eth0

exec horovodrun --gloo -np "$WORKERS" -H "$HOSTS" --network-interfaces "$INTERFACE" python "$@"
