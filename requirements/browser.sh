#!/bin/sh
# Makes sure that Chromium or Chrome is there for tests/integration/test_page_browser.py, and says what it does.
# It installs nothing if there is one, in the system or in Playwright's folder. Else root on a system with apt gets
# Debian's chromium, unless BROWSER=none. Any other user is told what to install. Without a browser that test
# is skipped (or fails, where CI=true).
set -eu

test_file="tests/integration/test_page_browser.py"
for name in chromium chromium-browser google-chrome google-chrome-stable; do
    if command -v "$name" >/dev/null 2>&1; then
        exit 0
    fi
done
if .venv/bin/python -c '
import os, sys
from playwright.sync_api import sync_playwright
with sync_playwright() as playwright:
    sys.exit(not os.path.exists(playwright.chromium.executable_path))' >/dev/null 2>&1
then
    exit 0
fi

advice="install chromium or google-chrome, or run '.venv/bin/playwright install chromium'"
if [ "${BROWSER:-}" = none ] || [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "no chromium or google-chrome for $test_file: $advice"
    exit 0
fi
echo "installing the system packages chromium and fonts-dejavu-core by apt-get, for $test_file"
echo "(BROWSER=none leaves them out, and that test is skipped)"
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; } >/dev/null
then
    echo "apt-get could not install chromium: $advice"
fi
