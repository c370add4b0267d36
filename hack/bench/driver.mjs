// Opens buckets with the npm package ("open"), or reserves and commits in them for a
// while and prints what it measured ("spend").
// Arguments: which of both, callers, buckets, milliseconds of warm-up and of measuring,
// a number that makes the buckets new ones.
import pg from "pg";
import { PostgresTokenLeaseStore, TokenLeaseLedger } from "token-lease";

const mode = process.argv[2];
const [callers, buckets, warmUp, window, round] = process.argv.slice(3).map(Number);
const connections = 32;
const pool = new pg.Pool({ connectionString: process.env.BENCH_DATABASE_URL, max: connections });
const ledger = new TokenLeaseLedger({ store: new PostgresTokenLeaseStore(pool) });
const name = (i) => `bench-${round}-${i}`;

const open = async () => {
  for (let i = 0; i < buckets; i += connections) {
    const some = Array.from({ length: Math.min(connections, buckets - i) }, (_, k) => name(i + k));
    await Promise.all(some.map((bucket) => ledger.openBucket({ bucket, limit: 2 ** 50 })));
  }
};

const spend = async () => {
  const latenciesMs = [];
  let operations = 0;
  let inWindow = 0;
  let next = 0;
  const begin = performance.now() + warmUp;
  const end = begin + window;
  const count = () => {
    operations++;
    const now = performance.now();
    if (now > begin && now <= end) inWindow++;
  };
  const caller = async (place) => {
    for (let at = place; ; at += callers + 1) {
      const asked = performance.now();
      if (asked > end) return;
      const bucket = name(at % buckets);
      const { lease } = await ledger.reserve({ bucket, requestKey: String(next++), fingerprint: "f", tokens: 10 });
      count();
      await ledger.commit({ bucket, leaseId: lease.id, actualTokens: 7 });
      count();
      const answered = performance.now();
      if (answered > begin) latenciesMs.push(answered - asked);
    }
  };
  await Promise.all(Array.from({ length: callers }, (_, place) => caller(place)));
  process.stdout.write(JSON.stringify({ latenciesMs, inWindow, operations }));
};

await (mode === "open" ? open() : spend());
await pool.end();
