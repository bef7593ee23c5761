#!/bin/bash
# The Docker engine: engine.sh start|stop|status
#   start   installs and starts one where none answers; an engine that is running already is used as it is
#   stop    stops the engine that start started, and no other
#   status  prints "ours", "other" or "none"
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# The pid of the engine that we started, if it still runs.
our_engine() {
    local pid start
    [ -e "$ENGINE_RECORD" ] || return 1
    read -r pid start < "$ENGINE_RECORD"
    [ "$(start_time "$pid")" = "$start" ] && echo "$pid"
}
# When a process started, in clock ticks since boot; nothing where it has ended, though nobody may have waited for it.
start_time() { sed 's/.*) //; /^Z/d' "/proc/$1/stat" 2> /dev/null | cut -d' ' -f20; }

start() {
    local missing=() log=/var/log/everstep-dockerd.log pid
    command -v docker > /dev/null && command -v dockerd > /dev/null || engine_answers || missing+=(docker.io)
    compose version > /dev/null 2>&1 || missing+=(docker-compose)
    if ! engine_answers; then
        command -v ip > /dev/null || missing+=(iproute2)
        command -v iptables > /dev/null || missing+=(iptables)
    fi
    [ ${#missing[@]} = 0 ] || apt_install "${missing[@]}"
    engine_answers && return

    [ -z "${DOCKER_HOST:-}" ] || fail "no Docker engine answers at DOCKER_HOST=$DOCKER_HOST; unset it to have one started here"
    [ "$(id -u)" = 0 ] || fail "no Docker engine answers and starting one needs root: start yours, or run this as root"
    say "starting a Docker engine (its log: $log) ..."
    # A session of its own and no open files of ours, or the caller's pipe would stay open as long as the engine runs.
    setsid dockerd > "$log" 2>&1 < /dev/null &
    pid=$!
    for _ in $(seq 300); do
        if engine_answers; then
            echo "$pid $(start_time "$pid")" > "$ENGINE_RECORD"
            return
        fi
        kill -0 "$pid" 2> /dev/null || break
        sleep 0.1
    done
    kill "$pid" 2> /dev/null || true
    tail -n 5 "$log" >&2
    fail "the Docker engine did not start; the last lines of $log are above. Without one: make test CLUSTER=0"
}

stop() {
    local pid others
    pid=$(our_engine) || return 0
    others=$(docker ps --format '{{.Names}}' 2> /dev/null | tr '\n' ' ')
    if [ -n "$others" ]; then
        say "the Docker engine stays up: other containers run in it (${others% })"
        return
    fi
    kill "$pid"
    for _ in $(seq 300); do
        [ "$(start_time "$pid")" ] || break
        sleep 0.1
    done
    [ -z "$(start_time "$pid")" ] || fail "the Docker engine (pid $pid) does not stop; see /var/log/everstep-dockerd.log"
    rm -f "$ENGINE_RECORD"
    say "stopped the Docker engine that was started for the cluster"
}

case ${1:-} in
start) start ;;
stop) stop ;;
status) if ! engine_answers; then echo none; elif our_engine > /dev/null; then echo ours; else echo other; fi ;;
*)
    say "usage: docker/engine.sh start|stop|status"
    exit 64
    ;;
esac
