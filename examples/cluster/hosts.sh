#!/bin/bash
for host in host0 host1; do
  ssh "$host" HOSTS=2 RANKS=8 HEAD=host0:29500 ID=first bash /shared/launch.sh &
done
wait
