#!/bin/sh
# Makes sure that Chromium or Chrome is there for the test that opens a plan's page. Root on a system with
# apt gets Debian's chromium; anybody else is told what to do, and without a browser that test is skipped
# (or fails, where CI=true).
set -eu

for name in chromium chromium-browser google-chrome google-chrome-stable; do
    if command -v "$name" >/dev/null 2>&1; then
        exit 0
    fi
done

advice="install chromium or google-chrome, or run '.venv/bin/playwright install chromium'"
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "no chromium or google-chrome for tests/integration/test_page_browser.py: $advice"
    exit 0
fi
echo "installing chromium for tests/integration/test_page_browser.py"
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; } >/dev/null
then
    echo "apt-get could not install chromium: $advice"
fi
