// Runs sequences of operations on the npm package and answers each. One line of JSON
// is one sequence: {options, steps}, its answer is one line: a list as long as steps.
// A step is {clock, verb, input}, or refers to the lease of an earlier step by
// {lease: index}. The clock is in milliseconds, as the package has it.
import { createInterface } from "node:readline";
import { InMemoryTokenLeaseStore, TokenLeaseError, TokenLeaseLedger } from "token-lease";

const snapshotOf = (bucket, stepOfLease) => ({
  ...bucket,
  leases: bucket.leases.map((lease) => leaseOf(lease, stepOfLease)),
});
const leaseOf = (lease, stepOfLease) => ({ ...lease, id: stepOfLease.get(lease.id) });

const run = async ({ options, steps }) => {
  let now = 0;
  let made = 0;
  const store = new InMemoryTokenLeaseStore();
  const ledger = new TokenLeaseLedger({ ...options, store, clock: () => now, idFactory: () => `lease-${made++}` });
  const leases = [];
  const stepOfLease = new Map();
  const answers = [];
  for (const [index, step] of steps.entries()) {
    now = step.clock;
    const input = { ...step.input };
    if (step.lease !== undefined) input.leaseId = leases[step.lease] ?? "never-made";
    try {
      const value = await ledger[step.verb](input);
      const answer = {};
      if (value.lease !== undefined) {
        leases[index] = value.lease.id;
        if (!stepOfLease.has(value.lease.id)) stepOfLease.set(value.lease.id, index);
        answer.lease = leaseOf(value.lease, stepOfLease);
      }
      if (value.expiredLeaseIds !== undefined) {
        answer.expired = value.expiredLeaseIds.map((id) => stepOfLease.get(id));
      }
      answer.bucket = snapshotOf(value.bucket?.bucket === undefined ? value : value.bucket, stepOfLease);
      if (step.verb === "inspect") {
        const stored = Object.values((await store.read(input.bucket)).leases);
        for (const { id, requestHash, fingerprintHash } of stored) {
          const listed = answer.bucket.leases.find((lease) => lease.id === stepOfLease.get(id));
          Object.assign(listed, { requestHash, fingerprintHash });
        }
      }
      answers.push(answer);
    } catch (error) {
      if (!(error instanceof TokenLeaseError)) throw error;
      const details = { ...error.details };
      if (details.maxTtlMs !== undefined) {
        // Our ledger judges this once it has found the bucket and done what is due.
        await ledger.inspect({ bucket: input.bucket }).catch(() => {});
      }
      if (details.leaseId !== undefined) details.leaseId = stepOfLease.get(details.leaseId) ?? details.leaseId;
      answers.push({ code: error.code, details });
    }
  }
  return answers;
};

for await (const line of createInterface({ input: process.stdin })) {
  process.stdout.write(`${JSON.stringify(await run(JSON.parse(line)))}\n`);
}
