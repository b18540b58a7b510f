#!/bin/bash
# Machines with ssh and no scheduler: features over Ray, then training over torchrun. Run it on the first one.
# After any failure run it again: only missing work is done. At its end it stops all of your Ray on them.

HOSTS=(node1 node2 node3)             # this machine first
MODEL=qwen2.5-vl-7b
DRAFTER=sparrow
RUNS=s3://bucket/runs                 # holds MODEL's prompts; or a folder: all machines read its images/, if it has one
STORE=                                # if it is not in RUNS: a URL, or a folder that all machines share
VENV=$HOME/vlmdistill                 # a virtual environment under this path on all machines
SECRETS=$HOME/.vlmdistill-secrets     # on all machines, mode 600: export AWS_ACCESS_KEY_ID=... and so on
GPUS=8                                # of each machine
PORT=6379

common="--model $MODEL --runs $RUNS ${STORE:+--store $STORE}"
token=$(head -c 32 /dev/urandom | sha256sum | cut -c 1-64)
on() {  # run a command on a machine; the token goes through stdin, where `ps` does not show it
    ssh -o BatchMode=yes "$1" "read -r RAY_AUTH_TOKEN; export RAY_AUTH_TOKEN RAY_AUTH_MODE=token
        source $VENV/bin/activate; [ -f $SECRETS ] && source $SECRETS; $2" <<< "$token"
}
trap 'for host in "${HOSTS[@]}"; do on "$host" "ray stop" > /dev/null; done' EXIT

on "${HOSTS[0]}" "ray start --head --port=$PORT --node-name=${HOSTS[0]}" || exit 1
for host in "${HOSTS[@]:1}"; do on "$host" "ray start --address=${HOSTS[0]}:$PORT --node-name=$host" || exit 1; done
on "${HOSTS[0]}" "export RAY_ADDRESS=${HOSTS[0]}:$PORT
    vlmdistill doctor $common --machines ${#HOSTS[@]} && vlmdistill features $common --for $DRAFTER" || exit 1
for host in "${HOSTS[@]}"; do on "$host" "ray stop"; done

for host in "${HOSTS[@]}"; do
    on "$host" "torchrun --nnodes=${#HOSTS[@]} --nproc-per-node=$GPUS --rdzv-backend=c10d \
        --rdzv-endpoint=${HOSTS[0]}:$((PORT + 1)) --rdzv-id=$DRAFTER -m vlmdistill train $DRAFTER $common" &
    ranks+=($!)
done
status=0
for one in "${ranks[@]}"; do wait "$one" || status=1; done
exit $status
