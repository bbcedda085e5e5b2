/** What a check of `weir doctor` came to. */
export interface Finding {
  /** Stable: `ip-forward`, or `route web/b1` where there is one for each of several. */
  readonly name: string;
  /** `fail`: weir will not start, or some of its traffic will not pass. `skip`: it could not be seen, and `found` says why. */
  readonly status: 'ok' | 'warn' | 'fail' | 'skip';
  readonly found: string;
  /** What it is to weir, in a sentence. */
  readonly why: string;
  /** For a shell, as root; null: there is nothing to mend. Words in capitals are for the reader to fill in. */
  readonly mend: string | null;
}

/** A check before its outcome is known. */
export class Check {
  readonly name: string;
  readonly why: string;

  constructor(name: string, why: string) {
    this.name = name;
    this.why = why;
  }

  ok(found: string): Finding {
    return { name: this.name, status: 'ok', found, why: this.why, mend: null };
  }

  skip(found: string): Finding {
    return { name: this.name, status: 'skip', found, why: this.why, mend: null };
  }

  warn(found: string, mend: string | null): Finding {
    return { name: this.name, status: 'warn', found, why: this.why, mend };
  }

  fail(found: string, mend: string): Finding {
    return { name: this.name, status: 'fail', found, why: this.why, mend };
  }
}
