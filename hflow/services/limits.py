"""When the next request to a service may begin, and what the requests of a run have cost."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from hflow.metrics import declare

WINDOW_SECONDS = 60.0
"""The time in which requests and tokens are limited: any minute, not those of a clock."""

COST = declare(
    "service_cost/{service}", "", "cost of all requests to a service since the run's start, at its prices"
)
REQUESTS = declare(
    "service_requests/{service}",
    "requests",
    "requests to a service since the row before, failed ones included",
)
FAILURES = declare(
    "service_failures/{service}", "requests", "requests to a service that failed since the row before"
)
WAIT_SECONDS = declare(
    "service_wait_seconds/{service}", "s", "mean time that these requests waited for the service's limits"
)


@dataclass(frozen=True)
class ServiceSettings:
    """A service of the configuration, `services.NAME`. The fields are those of `config.ServiceConfig`."""

    name: str
    url: str
    model: str | None = None
    key_variable: str | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    connections: int = 64
    timeout: float = 60.0
    patience: float = 300.0
    backoff: float = 1.0
    budget: float | None = None
    max_requests: int | None = None
    request_price: float = 0.0
    input_price: float = 0.0
    output_price: float = 0.0

    @property
    def counts_tokens(self) -> bool:
        """Whether replies must say how many tokens were used."""
        return bool(self.tokens_per_minute is not None or self.input_price or self.output_price)

    def cost(self, input_tokens: int, output_tokens: int) -> float:
        """Return the price of a request that used so many tokens."""
        tokens = input_tokens * self.input_price + output_tokens * self.output_price
        return self.request_price + tokens / 1e6


@dataclass
class Spending:
    """What the requests of a run to one service add up to. It continues when the run is resumed."""

    requests: int = 0
    """Requests that were begun."""
    failures: int = 0
    tokens: int = 0
    cost: float = 0.0
    seconds_waited: float = 0.0
    """Time that requests waited for the limits."""


class ServiceLimits:
    """The limits of one service. It decides when a request may begin, by a clock in seconds.

    It updates `spending`, what the run has spent before.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        spending: Spending | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.spending = Spending() if spending is None else spending
        self._clock = clock
        self._begun: deque[float] = deque()
        """When the requests of the last minute began."""
        self._used: deque[tuple[float, int]] = deque()
        """When requests of the last minute ended, and their tokens."""
        self._used_tokens = 0
        """Sum of these tokens."""
        self._num_open = 0
        self._num_known = 0
        """Requests that succeeded, so that their tokens and cost are known."""
        self._known_tokens, self._known_cost = 0, 0.0
        self._paused_until = -float("inf")

    def begin(self) -> float | None:
        """Begin a request if it may begin now.

        Returns:
            0 if it has begun, else the seconds until the next attempt; None: when a request has ended.
        """
        now, settings = self._clock(), self.settings
        self._forget(now)
        if self._num_open >= settings.connections or self._needs_size or not self._can_pay():
            return None
        waits = [self._paused_until - now]
        if settings.requests_per_minute is not None and len(self._begun) >= settings.requests_per_minute:
            waits.append(self._begun[0] + WINDOW_SECONDS - now)
        if settings.tokens_per_minute is not None and not self._has_tokens(settings.tokens_per_minute):
            if not self._used:
                return None
            waits.append(self._used[0][0] + WINDOW_SECONDS - now)
        if (wait := max(waits)) > 0:
            return wait
        self._begun.append(now)
        self._num_open += 1
        self.spending.requests += 1
        return 0.0

    def end(self, tokens: int = 0, cost: float | None = None, pause: float = 0.0) -> None:
        """End a request that used so many tokens; no other may begin for `pause` seconds.

        A cost of None is not known, and counts as the mean of the others.
        """
        now = self._clock()
        self._num_open -= 1
        self._paused_until = max(self._paused_until, now + pause)
        if tokens or cost:
            self._used.append((now, tokens))
            self._used_tokens += tokens
            self._num_known += 1
            self._known_tokens += tokens
            self._known_cost += cost or 0.0
        self.spending.tokens += tokens
        self.spending.cost += self._mean_cost if cost is None else cost

    @property
    def expected_cost(self) -> float:
        """What was spent, and what the requests under way will cost if they cost as much as the others."""
        return self.spending.cost + self._num_open * self._mean_cost

    @property
    def problem(self) -> str | None:
        """Why no request may begin any more, in one line; None: one may, now or later."""
        settings, spent = self.settings, self.spending
        if self._num_open:
            return None  # it may cost less than the others
        if settings.budget is not None and spent.cost >= settings.budget:
            key, used = "budget", f"{spent.cost:.6g} for {spent.requests:,} requests"
        elif settings.max_requests is not None and spent.requests >= settings.max_requests:
            key, used = "max_requests", f"{spent.requests:,} requests"
        else:
            return None
        key = f"services.{settings.name}.{key}"
        return f"{key} is used up: the run has spent {used}. Raise {key} to continue"

    @property
    def _needs_size(self) -> bool:
        """Whether the tokens of a first request must be known before there is another one."""
        settings = self.settings
        has_limit = settings.tokens_per_minute is not None or settings.budget is not None
        return bool(has_limit and settings.counts_tokens and self._num_open and not self._num_known)

    @property
    def _mean_cost(self) -> float:
        if self._num_known:
            return self._known_cost / self._num_known
        return self.settings.request_price

    def _can_pay(self) -> bool:
        """Return whether the budget is enough for the requests under way and another one."""
        settings, spent = self.settings, self.spending
        if settings.max_requests is not None and spent.requests >= settings.max_requests:
            return False
        return settings.budget is None or self.expected_cost < settings.budget

    def _has_tokens(self, limit: int) -> bool:
        """Return whether the tokens of the requests under way and of another one fit into the minute.

        The tokens of a request are known when it has ended. Until then it counts as the mean of the others.
        """
        if not self._used and not self._num_open:
            return True
        mean = self._known_tokens / max(1, self._num_known)
        return self._used_tokens + (self._num_open + 1) * mean <= limit

    def _forget(self, now: float) -> None:
        """Forget what was more than a minute ago."""
        while self._begun and self._begun[0] + WINDOW_SECONDS <= now:
            self._begun.popleft()
        while self._used and self._used[0][0] + WINDOW_SECONDS <= now:
            self._used_tokens -= self._used.popleft()[1]
