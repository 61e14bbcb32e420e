#!/usr/bin/env bash
# A real Slurm on this one machine: munged, slurmctld and slurmd, to try jobs on.
#
#   launch/slurm_local.sh start FOLDER    installs what is missing, starts it, waits
#   launch/slurm_local.sh stop FOLDER     ends the three
#
# Everything lives below FOLDER, and runs as whoever calls it. Jobs of the partition
# "urgent" preempt those of "all", which have a minute to leave. Use it with
#   export SLURM_CONF=FOLDER/slurm.conf
# Exit codes: 0 it answers; 69 it cannot be installed here; 70 it does not start.
set -euo pipefail

usage() {
    sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
    exit 64
}

[ $# -eq 2 ] || usage
action=$1
mkdir -p "$2"
folder=$(cd "$2" && pwd -P)
export SLURM_CONF=$folder/slurm.conf PATH=$PATH:/usr/sbin:/sbin

say() { printf 'slurm_local: %s\n' "$*" >&2; }

die() {
    code=$1
    shift
    say "$@"
    exit "$code"
}

has_all() {
    for program in munged slurmctld slurmd sbatch srun scontrol scancel squeue; do
        command -v "$program" >/dev/null || return 1
    done
}

install() {
    has_all && return
    command -v apt-get >/dev/null || die 69 "no Slurm here, and no apt-get to install it"
    [ "$(id -u)" -eq 0 ] || die 69 "no Slurm here, and only root can install it:" \
        "apt-get install slurm-wlm munge"
    say "installing slurm-wlm and munge"
    export DEBIAN_FRONTEND=noninteractive
    # Its daemons are started below, with a configuration of their own.
    { apt-get update && apt-get install -y --no-install-recommends slurm-wlm munge; } \
        >"$folder/install.log" 2>&1 || die 69 "it cannot be installed; see $folder/install.log"
    has_all || die 69 "it is installed but incomplete; see $folder/install.log"
}

# Free now; nobody else on a machine for tests takes them within the second.
free_ports() {
    python3 - <<'PYTHON'
import socket

sockets = [socket.socket() for _ in range(2)]
for one in sockets:
    one.bind(("", 0))
print(*(one.getsockname()[1] for one in sockets))
PYTHON
}

configure() {
    mkdir -p "$folder"/{munge,state,spool}
    chmod 755 "$folder" "$folder/munge"
    [ -s "$folder/munge/key" ] || (umask 077 && head -c 1024 /dev/urandom >"$folder/munge/key")
    read -r ctld_port slurmd_port < <(free_ports)
    # What matters to jobs that stop and go on: a requeued one waits until its former
    # credential has expired, two minutes by default; KillWait is from SIGTERM to SIGKILL.
    cat >"$SLURM_CONF" <<CONF
ClusterName=local
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$ctld_port
SlurmdPort=$slurmd_port
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=${SLURM_LOCAL_KILL_WAIT:-30}
OverTimeLimit=0
MinJobAge=3600
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2
NodeName=$(hostname -s) NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
CONF
}

start() {
    install
    if [ -s "$SLURM_CONF" ] && sinfo -h >/dev/null 2>&1; then
        say "it runs already: SLURM_CONF=$SLURM_CONF"
        return
    fi
    configure
    munged --force --key-file="$folder/munge/key" --socket="$folder/munge/socket" \
        --pid-file="$folder/munge/pid" --log-file="$folder/munge/log" \
        --seed-file="$folder/munge/seed" || die 70 "munged does not start; see $folder/munge/log"
    slurmctld -c -i || die 70 "slurmctld does not start; see $folder/slurmctld.log"
    slurmd || die 70 "slurmd does not start; see $folder/slurmd.log"
    for _ in $(seq 60); do
        case $(sinfo -h -o %t 2>/dev/null) in
        idle* | mix* | alloc*)
            say "it runs: export SLURM_CONF=$SLURM_CONF"
            return
            ;;
        esac
        sleep 1
    done
    stop
    die 70 "no node came up within a minute; see the logs in $folder"
}

stop() {
    for pid_file in slurmd.pid slurmctld.pid munge/pid; do
        if [ -s "$folder/$pid_file" ]; then
            kill "$(cat "$folder/$pid_file")" 2>/dev/null || true
            rm -f "$folder/$pid_file"
        fi
    done
}

case $action in
start) start ;;
stop) stop ;;
*) usage ;;
esac
