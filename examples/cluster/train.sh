#!/bin/bash
run=/shared/runs/first
exec python -m macrobatch train --config /shared/settings.toml $(test -e "$run/run.json" && echo --resume)
