#!/usr/bin/env bash
# The first process of a machine of the cluster, in namespaces of its own: boot.sh NAME STATE.
# It gives the machine its own view of a few files, then lives on as the parent of whatever
# loses its own; when it ends, the kernel ends every process of the machine.
set -euo pipefail
name=$1 state=$2
own=$state/machines/$name

# As seen from outside, for as long as the outside's /proc is mounted.
read -r stat </proc/self/stat
read -r -a fields <<<"${stat##*) }"

mount --make-rprivate /
hostname "$name"
mount -t proc proc /proc
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
# A /sys that shows this machine's interfaces, and no cgroups: those belong to the host.
mount -t sysfs sysfs /sys
mount --bind "$own/hosts" /etc/hosts
if [ -e /etc/resolv.conf ]; then
    mount --bind "$state/resolv.conf" "$(readlink -f /etc/resolv.conf)"
fi
if [ "$name" != controller ]; then
    mount --bind "$own" "$state/local"
fi
ip link set lo up
# Whatever this machine prefers. BBR, which some do, pauses to measure a link: shaped ones stood idle
# for 5 % of the time, and what was measured over them was that.
{ echo reno >/proc/sys/net/ipv4/tcp_congestion_control; } 2>/dev/null || :

printf '%s %s\n' "${stat%% *}" "${fields[19]}" >"$own/init.new"
mv "$own/init.new" "$own/init"
trap : CHLD
while :; do
    sleep infinity &
    wait $! || :
done
