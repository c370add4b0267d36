package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/token-lease/operator/hack/devenv/process"
	"github.com/token-lease/operator/hack/devenv/scratch"
)

// redisContender keeps a bucket in a hash and each lease in a hash of its own. A
// script decides, and the append-only file is synced before each answer.
type redisContender struct {
	dir     *scratch.Dir
	process *process.Process
	client  *redis.Client
	opened  int
}

// reserveScript takes the bucket, the lease, the tokens and the expiry.
var reserveScript = redis.NewScript(`
if redis.call('EXISTS', KEYS[2]) == 1 then return 1 end
local b = redis.call('HMGET', KEYS[1], 'limit', 'used', 'reserved')
if tonumber(b[1]) - tonumber(b[2]) - tonumber(b[3]) < tonumber(ARGV[1]) then return 0 end
redis.call('HINCRBY', KEYS[1], 'reserved', ARGV[1])
redis.call('HSET', KEYS[2], 'state', 'reserved', 'tokens', ARGV[1], 'expires', ARGV[2])
return 1`)

// commitScript takes the bucket, the lease and the actual tokens.
var commitScript = redis.NewScript(`
local l = redis.call('HMGET', KEYS[2], 'state', 'tokens')
if l[1] ~= 'reserved' then return 0 end
redis.call('HINCRBY', KEYS[1], 'reserved', -tonumber(l[2]))
redis.call('HINCRBY', KEYS[1], 'used', ARGV[1])
redis.call('HSET', KEYS[2], 'state', 'committed', 'actual', ARGV[1])
return 1`)

const redisReady = 20 * time.Second

func openRedis(ctx context.Context) (_ *redisContender, err error) {
	program, err := findRedis(ctx)
	if err != nil {
		return nil, err
	}
	dir, err := scratch.New("", "redis")
	if err != nil {
		return nil, err
	}
	c := &redisContender{dir: dir}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.close())
		}
	}()
	port, err := process.FreePort()
	if err != nil {
		return nil, err
	}
	c.client = redis.NewClient(&redis.Options{Addr: fmt.Sprintf("%s:%d", process.Loopback, port), PoolSize: 128})
	c.process, err = process.Start(process.Command{
		Path: program, Dir: dir.Path, LogFile: filepath.Join(dir.Path, "log"),
		Args: []string{
			"--bind", process.Loopback, "--port", strconv.Itoa(port), "--dir", dir.Path,
			"--appendonly", "yes", "--appendfsync", "always", "--save", "", "--auto-aof-rewrite-percentage", "0",
		},
	})
	if err != nil {
		return nil, err
	}
	err = c.process.WaitReady(ctx, redisReady, func(ctx context.Context) error { return c.client.Ping(ctx).Err() })
	return c, err
}

func findRedis(ctx context.Context) (string, error) {
	if program, err := exec.LookPath("redis-server"); err == nil {
		return program, nil
	}
	fmt.Fprintln(os.Stderr, "bench: no redis-server found, installing the package redis-server with apt-get")
	install := exec.CommandContext(ctx, "apt-get", "install", "--yes", "--no-install-recommends", "redis-server")
	if output, err := install.CombinedOutput(); err != nil {
		return "", fmt.Errorf("redis-server is needed and could not be installed (%w): install it, or leave Redis out with -only; apt-get says: %s", err, output)
	}
	return exec.LookPath("redis-server")
}

func (c *redisContender) close() error {
	var errs []error
	if c.client != nil {
		errs = append(errs, c.client.Close())
	}
	if c.process != nil {
		errs = append(errs, c.process.Kill())
	}
	return errors.Join(append(errs, c.dir.Remove())...)
}

// settings are those that say how durable its answers are, as it reports them.
func (c *redisContender) settings(ctx context.Context) ([]setting, error) {
	version, err := c.info(ctx, "server", "redis_version")
	if err != nil {
		return nil, err
	}
	all := []setting{{"redis_version", version}}
	for _, name := range []string{"appendonly", "appendfsync"} {
		values, err := c.client.ConfigGet(ctx, name).Result()
		if err != nil {
			return nil, err
		}
		all = append(all, setting{name, values[name]})
	}
	return all, nil
}

// appended is how many bytes its append-only file has.
func (c *redisContender) appended(ctx context.Context) (int64, error) {
	size, err := c.info(ctx, "persistence", "aof_current_size")
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(size, 10, 64)
}

// info is one line of a section of what INFO answers.
func (c *redisContender) info(ctx context.Context, section, name string) (string, error) {
	text, err := c.client.Info(ctx, section).Result()
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(text) {
		if value, found := strings.CutPrefix(line, name+":"); found {
			return strings.TrimSpace(value), nil
		}
	}
	return "", fmt.Errorf("INFO %s says nothing of %s", section, name)
}

func (c *redisContender) prepare(ctx context.Context, l load, _ time.Duration) error {
	for ; c.opened < l.buckets; c.opened++ {
		if err := c.client.HSet(ctx, bucketName(c.opened), "limit", int64(plenty), "used", 0, "reserved", 0).Err(); err != nil {
			return err
		}
	}
	return nil
}

func (c *redisContender) measure(ctx context.Context, l load, warmUp, window time.Duration) (sample, error) {
	return spend(ctx, l, warmUp, window, c.spend)
}

func (c *redisContender) spend(ctx context.Context, bucket string, n int64) error {
	keys := []string{bucket, bucket + "/" + strconv.FormatInt(n, 10)}
	if ok, err := reserveScript.Run(ctx, c.client, keys, tokensReserved, time.Now().Add(time.Minute).UnixMilli()).Int(); err != nil || ok != 1 {
		return errors.Join(err, errNoRoom)
	}
	ok, err := commitScript.Run(ctx, c.client, keys, tokensUsed).Int()
	if err == nil && ok != 1 {
		err = errors.New("the lease is not reserved")
	}
	return err
}
