#!/bin/sh
# Compiles the native code for platforms that this machine is not, with Zig's C++ compiler, and runs
# the fuzz targets of those that it can run: directly, or by QEMU's user mode (qemu-user).
# Usage: sh scripts/targets.sh [SECONDS for each fuzz target, 10]
set -eu
cd "$(dirname "$0")/.."

seconds=${1:-10}
out=build/targets
core=$(find native -maxdepth 1 -name '*.cpp' ! -name bindings.cpp | sort)
targets="x86_64-linux-musl aarch64-linux-musl aarch64-linux-gnu.2.28 x86_64-macos aarch64-macos"

[ -x "$out/venv/bin/python" ] || python3 -m venv "$out/venv"
"$out/venv/bin/python" -m pip install --quiet --disable-pip-version-check 'ziglang>=0.13,<1'

compile() { # TARGET SOURCE OBJECT
    "$out/venv/bin/python" -m ziglang c++ -target "$1" -std=c++20 -O2 -DDELTAWIRE_SMALL_SIZES \
        -Inative -c "$2" -o "$3"
}

for target in $targets; do
    objects=
    mkdir -p "$out/$target"
    for source in $core; do
        object=$out/$target/$(basename "$source" .cpp).o
        compile "$target" "$source" "$object"
        objects="$objects $object"
    done
    case $target in *-musl) ;; *) echo "$target: compiles"; continue ;; esac

    run=
    if [ "${target%%-*}" != "$(uname -m)" ]; then
        run=qemu-${target%%-*}
        command -v "$run" >/dev/null || { echo "$target: compiles; $run is not installed"; continue; }
    fi
    for program in seeds delta whole round_trip; do
        compile "$target" "native/fuzz/$program.cpp" "$out/$target/fuzz-$program.o"
        driver=
        if [ "$program" != seeds ]; then
            driver=$out/$target/driver.o
            compile "$target" native/fuzz/driver.cpp "$driver"
        fi
        # shellcheck disable=SC2086 # Lists of words.
        "$out/venv/bin/python" -m ziglang c++ -target "$target" -static \
            "$out/$target/fuzz-$program.o" $driver $objects -o "$out/$target/fuzz-$program"
    done
    seeds=$out/$target/seeds
    rm -rf "$seeds"
    mkdir -p "$seeds"
    $run "$out/$target/fuzz-seeds" "$seeds/delta" "$seeds/whole" "$seeds/round_trip"
    for program in delta whole round_trip; do
        mkdir -p "$out/$target/corpus/$program"
        $run "$out/$target/fuzz-$program" "-max_total_time=$seconds" -seed=1 -runs=-1 -timeout=60 \
            -max_len=16384 -print_final_stats=1 -verbosity=0 \
            "$out/$target/corpus/$program" "$seeds/$program" 2>&1 | sed "s/^/$target, $program: /"
    done
    # The codec makes the same bytes on every platform.
    if [ -n "${first:-}" ]; then
        diff -r "$first" "$seeds"
        echo "$target: payloads equal those of ${first#"$out"/}"
    else
        first=$seeds
    fi
done
