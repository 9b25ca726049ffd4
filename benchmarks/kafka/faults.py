"""Kill consumers and the service, cut connections, stop brokers, and compare the log with the topic.

A topic of mock brokers is filled as fast as two consumers of one group read it. They post to a service on Redis or
SQLite, through a proxy that cuts connections too. In the end each record must be in the log of its user once, and in
order, and each poisoned one among the dead letters: exit status 1 where it is not.

    python -m benchmarks.kafka.faults --model models/ml-1m --records 1000000 --kills 100 --cuts 10000
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal

import typer
from confluent_kafka import Consumer, TopicPartition
from rich.console import Console

from app.serving.served_generation import generation_of
from app.serving.store_factory import opened_store
from app.settings import StoreSettings
from benchmarks import machine
from benchmarks.harness.faults.tcp_proxy import Address, TcpProxy
from benchmarks.harness.fork_server import fork_server
from benchmarks.harness.service_process import START_TIMEOUT_S, free_port
from benchmarks.harness.supervised_process import SupervisedProcess, is_ready
from benchmarks.harness.topology import redis_server
from benchmarks.kafka.brokers import FETCH, HEARTBEAT, OFFSET_COMMIT, MockBrokers, mock_brokers
from benchmarks.kafka.consumed_topic import RECONNECT, USERS, ConsumedTopic
from model.artifact import model_directory
from storage.state.event import Event

HOST = "127.0.0.1"
TOPIC, GROUP, DEAD_LETTERS = "clicks", "lisarec", "dead-letters"
PARTITIONS, BROKERS, CONSUMERS = 16, 3, 2
COORDINATOR = 1  # the broker that the group commits to
BATCH_SIZE = 500  # so that there are requests enough to cut
SERVICE_KILLS = 10  # one in so many
POSTED_SHARE = 0.1  # of the cuts: between consumers and service; the others are at the brokers
CUT_REQUESTS = (*[FETCH] * 8, OFFSET_COMMIT, HEARTBEAT)
DOWN_S = (0.2, 2.0)
LETTERS_TIMEOUT_S = 200.0
# who is killed is missed soon, and whose connection is cut comes back soon
PROPERTIES = """
session.timeout.ms=3000
heartbeat.interval.ms=500
reconnect.backoff.ms=20
reconnect.backoff.max.ms=200
"""

console = Console()


@dataclass(frozen=True)
class FaultPlan:
    """Number of records, and of faults spread over them."""

    model: Path
    store: Literal["redis", "sqlite"]
    records: int
    kills: int
    cuts: int
    rebalances: int
    failures: int


@dataclass
class Verdict:
    """The comparison of log and topic; correct if all fields except `logged` and `letters` are zero."""

    logged: int = 0
    lost: int = 0
    doubled: int = 0
    disordered: int = 0  # users
    letters: int = 0
    missing_letters: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def is_correct(self) -> bool:
        """Return whether no fault was found."""
        return not (self.lost or self.doubled or self.disordered or self.missing_letters)


class FaultRun:
    """The running processes, and the faults spread over the records."""

    def __init__(self, plan: FaultPlan, brokers: MockBrokers, directory: Path, store: Sequence[str]) -> None:
        self.plan = plan
        self.topic = ConsumedTopic(brokers.addresses, TOPIC, PARTITIONS, GROUP, plan.records)
        self.faults = Counter[str]()
        self._brokers = brokers
        self._directory = directory
        self._random = random.Random(1)
        self._address: Address = (HOST, free_port())
        serve = ["serve", "--model", str(plan.model), "--port", str(self._address[1]), *store]
        self._service = SupervisedProcess("service", lambda: self._spawn("service", serve), self._serves)
        self._proxy = TcpProxy("service", self._address, self._is_cut_due, lambda _: self._note("cut: service"))
        self._consumers: list[SupervisedProcess] = []

    async def run(self, item_ids: Sequence[str]) -> None:
        """Fill and consume the topic, with all faults."""
        await self._service.start()
        host, port = await self._proxy.listen((HOST, 0))
        self._consumers = [self._consumer(number, f"http://{host}:{port}") for number in range(CONSUMERS)]
        for consumer in self._consumers:
            await consumer.start()
        following = asyncio.create_task(asyncio.to_thread(self.topic.follow))
        filling = asyncio.create_task(asyncio.to_thread(self.topic.fill, item_ids))
        faults = [
            asyncio.create_task(self._spread(count, fault))
            for count, fault in (
                (self.plan.kills, self._kill),
                (self.plan.rebalances, self._rebalance),
                (self.plan.failures, self._fail_broker),
            )
        ]
        cutting = asyncio.create_task(self._cut_at_brokers())
        await asyncio.gather(filling, following, *faults)
        cutting.cancel()
        for process in (*self._consumers, self._service):
            await process.close()
        self._proxy.close()

    def _consumer(self, number: int, url: str) -> SupervisedProcess:
        properties = self._directory / "properties"
        properties.write_text(PROPERTIES)
        command = ["consume", "--brokers", self._brokers.addresses, "--topic", TOPIC, "--group", GROUP, "--url", url]
        command += ["--dead-letters", DEAD_LETTERS, "--properties", str(properties)]
        command += ["--batch-size", str(BATCH_SIZE)]

        async def is_there() -> bool:
            return True

        name = f"consumer-{number}"
        return SupervisedProcess("consumer", lambda: self._spawn(name, command), is_there)

    def _spawn(self, name: str, command: Sequence[str]) -> int:
        return fork_server().spawn(command, self._directory / f"{name}.log")

    async def _serves(self) -> bool:
        return await is_ready(self._address)

    def _note(self, fault: str) -> None:
        self.faults[fault] += 1

    @property
    def _progress(self) -> float:
        return self.topic.committed / self.plan.records

    def _is_cut_due(self) -> bool:
        return self.faults["cut: service"] < self.plan.cuts * POSTED_SHARE * min(1.0, 1.1 * self._progress)

    async def _spread(self, count: int, fault: Callable[[int], Awaitable[None]]) -> None:
        """Inject one fault after another, evenly spread over the records."""
        for number in range(count):
            while self._progress < (number + 0.5) / count:
                await asyncio.sleep(0.02)
            await fault(number)

    async def _kill(self, number: int) -> None:
        is_service = number % SERVICE_KILLS == SERVICE_KILLS - 1
        process = self._service if is_service else self._consumers[number % CONSUMERS]
        await process.is_ready_within(START_TIMEOUT_S)
        process.kill()
        self._note(f"kill -9: {process.kind}")

    async def _rebalance(self, number: int) -> None:
        """Let a consumer leave the group and rejoin at once."""
        consumer = self._consumers[number % CONSUMERS]
        await consumer.is_ready_within(START_TIMEOUT_S)
        consumer.send(signal.SIGTERM)
        self._note("consumer left and came back")

    async def _fail_broker(self, number: int) -> None:
        broker = number % BROKERS + 1
        for partition in range(PARTITIONS):
            if self._random.random() < 0.2:
                leader = self._random.randrange(BROKERS) + 1
                await asyncio.to_thread(self._brokers.move, TOPIC, partition, leader)
                self._note("leader moved")
        await asyncio.to_thread(self._brokers.stop, broker)
        await asyncio.sleep(self._random.uniform(*DOWN_S))
        await asyncio.to_thread(self._brokers.start, broker)
        self._note("broker down")

    async def _cut_at_brokers(self) -> None:
        """Request cuts as they become due; a cut counts once it happened."""
        planned = round(self.plan.cuts * (1 - POSTED_SHARE))
        pushed = 0
        while True:
            await asyncio.sleep(0.05)
            due = min(planned, round(planned * 1.1 * self._progress)) - pushed
            for number in range(max(0, due)):
                request = CUT_REQUESTS[(pushed + number) % len(CUT_REQUESTS)]
                broker = self._random.randrange(BROKERS) + 1 if request == FETCH else COORDINATOR
                await asyncio.to_thread(self._brokers.cut, broker, request, 1)
            pushed += max(0, due)
            waiting = 0
            for broker in range(1, BROKERS + 1):
                for request in set(CUT_REQUESTS):
                    waiting += await asyncio.to_thread(self._brokers.uncut, broker, request)
            self.faults["cut: brokers"] = pushed - waiting


async def judge(settings: StoreSettings, model: Path, topic: ConsumedTopic) -> Verdict:
    """Compare the log of every user with the topic."""
    found: list[list[int]] = [[] for _ in range(USERS)]
    async with opened_store(settings, generation_of(model_directory.load(model))) as store:
        async for page in store.log():
            for _, entry in page.entries:
                if isinstance(entry.record, Event):
                    user = int(entry.record.user_id.removeprefix("user-"))
                    found[user].append(int(entry.record.value or 0))
    verdict = Verdict()
    for user, log in enumerate(found):
        numbers = Counter(log)
        verdict.logged += len(log)
        verdict.lost += sum(number not in numbers for number in range(user, topic.records, USERS))
        verdict.doubled += sum(count > topic.copies.get(number, 1) for number, count in numbers.items())
        verdict.disordered += list(dict.fromkeys(log)) != sorted(numbers)
    return verdict


def count_letters(addresses: str) -> int:
    """Return the number of records with dead letters."""
    # cuts may be left: with the client's own pauses, which grow to 10 s, few of them would outlast any patience
    reader = Consumer({"bootstrap.servers": addresses, "group.id": "letters", **RECONNECT})
    place = TopicPartition(DEAD_LETTERS, 0, 0)
    end = reader.get_watermark_offsets(place, timeout=LETTERS_TIMEOUT_S)[1]
    reader.assign([place])
    found, newest = set(), -1
    while newest + 1 < end:
        for record in reader.consume(1_000, 1):
            if record.error() is None:
                headers = dict(record.headers() or [])
                found.add((headers["lisarec-partition"], headers["lisarec-offset"]))
                newest = int(record.offset() or 0)
    reader.close()
    return len(found)


def run_faults(plan: FaultPlan) -> Verdict:
    """Run the plan; return the verdict."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(TemporaryDirectory()))
        brokers = stack.enter_context(mock_brokers(BROKERS))
        brokers.create_topic(TOPIC, PARTITIONS)
        brokers.create_topic(DEAD_LETTERS, 1)
        brokers.coordinate(GROUP, COORDINATOR)
        if plan.store == "redis":
            url = stack.enter_context(redis_server(directory))
            settings, options = StoreSettings(redis_url=url), ["--redis-url", url]
        else:
            state = directory / "state"
            settings, options = StoreSettings(data_dir=state), ["--data-dir", str(state)]
        run = FaultRun(plan, brokers, directory, options)
        begin_s = time.monotonic()
        asyncio.run(run.run(model_directory.load(plan.model).items.ids))
        seconds = time.monotonic() - begin_s
        verdict = asyncio.run(judge(settings, plan.model, run.topic))
        verdict.seconds, verdict.faults = seconds, run.faults
        verdict.letters = count_letters(brokers.addresses)
        verdict.missing_letters = run.topic.poisoned - verdict.letters
        return verdict


def main(
    model: Annotated[Path, typer.Option(help="Model directory.")],
    store: Annotated[Literal["redis", "sqlite"], typer.Option(help="Of the service.")] = "redis",
    records: Annotated[int, typer.Option(min=1_000)] = 100_000,
    kills: Annotated[int, typer.Option(min=0, help="kill -9, one in ten of the service.")] = 10,
    cuts: Annotated[int, typer.Option(min=0, help="Connections, nine in ten at the brokers.")] = 1_000,
    rebalances: Annotated[int, typer.Option(min=0, help="Consumers that leave and come back.")] = 5,
    failures: Annotated[int, typer.Option(min=0, help="Brokers that go away for a while.")] = 3,
) -> None:
    """Print the injected faults and the verdict."""
    verdict = run_faults(FaultPlan(model, store, records, kills, cuts, rebalances, failures))
    console.print(f"{machine.cpu()}, {store}", highlight=False)
    console.print(", ".join(f"{count:,} {fault}" for fault, count in sorted(verdict.faults.items())), highlight=False)
    console.print(
        f"{verdict.logged:,} records logged in {verdict.seconds:,.0f} s ({records / verdict.seconds:,.0f}/s): "
        f"{verdict.lost:,} lost, {verdict.doubled:,} doubled, {verdict.disordered:,} users out of order; "
        f"{verdict.letters:,} dead letters, {verdict.missing_letters:,} missing",
        highlight=False,
    )
    if not verdict.is_correct:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
